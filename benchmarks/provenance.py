"""Where a benchmark's numbers come from, and the file they go into (see README.md beside this)."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_code import fingerprint

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("lightning", "diffusers", "triton", "deepspeed", "flash-attn-4", "numpy", "pyarrow", "av", "webdataset")


def parser(
    description: str | None, output: str = "file to write; left out, one under benchmarks/results"
) -> argparse.ArgumentParser:
    """A benchmark's command line, which all of them have: the file to write, and the commit that is measured."""
    line = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--output", type=Path, help=output)
    line.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    return line


def commit() -> str:
    """The commit that is checked out.

    Raises:
        RuntimeError: If other files than results differ from it: a dirty tree is not measured.
    """
    others = (":/", ":(top,exclude)benchmarks/results")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *others)
    if changed:
        raise RuntimeError(f"Commit first, or pass the commit that was measured; these files were changed:\n{changed}")
    return _output("git", "rev-parse", "HEAD")


def machine() -> dict[str, Any]:
    """The GPUs and the versions of what drives them, and of the packages that take part."""
    packages = {"packages": dict(_versions())}
    if not torch.cuda.is_available():
        return {"gpu": None, "gpus": 0, "torch": torch.__version__} | packages
    return packages | {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def path(room: str, name: str) -> Path:
    """The result file of a benchmark on this machine's GPUs, such as ``parallel/all_to_all-h200x4.json``."""
    gpus = torch.cuda.device_count()
    machine = model(torch.cuda.get_device_name()) + (f"x{gpus}" if gpus > 1 else "") if gpus else "cpu"
    return RESULTS / room / f"{name}-{machine}.json"


def model(device: str) -> str:
    """A GPU's model as files are named by it: ``h100`` of "NVIDIA H100 80GB HBM3"."""
    words = device.lower().split()
    return next((word for word in words if any(map(str.isdigit, word))), words[-1])


def write(path: Path, benchmark: str, commit: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes one result file; whoever reads after this process was killed finds it, or the one before, whole."""
    result = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "code": fingerprint(benchmark),
        "machine": machine(),
        "settings": settings,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def differences(found: dict[str, Any], benchmark: str, settings: dict[str, Any]) -> list[str]:
    """In what a result file that was read differs from a run that would go on with it; empty: in nothing."""
    here = {"benchmark": benchmark, "code": fingerprint(benchmark), "machine": machine()}
    other = [name for name, value in here.items() if found[name] != value]
    return other + [name for name, value in settings.items() if found["settings"].get(name) != value]


def table(file: Path) -> dict[str, str]:
    """What names a table of clips that was measured on, whatever its path: its file's name and hash."""
    return {"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
