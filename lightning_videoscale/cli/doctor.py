"""`videoscale doctor`: what this machine has, what is known to be bad about it, and the remedy."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_videoscale.attention import KERNELS
from lightning_videoscale.attention.kernel import needs_capability
from lightning_videoscale.cli.doctor_model import examine_model
from lightning_videoscale.cli.finding import Finding
from lightning_videoscale.compat.names import installed_version
from lightning_videoscale.compat.torch.versions import mix_order_reduction_is_wrong
from lightning_videoscale.parallel.transport import what_lacks

_REQUIRED = ("lightning-videoscale", "torch", "lightning", "torchmetrics", "webdataset", "triton")
_OPTIONAL = {
    "diffusers": ("Wan and other models of diffusers, and their VAEs", "diffusers"),
    "accelerate": ("loading models of diffusers that keep parts in float32, as Wan does", "diffusers"),
    "av": ("videos and images", "video"),
    "pillow": ("animated WebP and TIFF", "video"),
    "transformers": ("encoding captions", "text"),
    "pyarrow": ("Parquet: tables of captions, and videos and images in it", "parquet"),
    "peft": ("LoRA and other adapters", "peft"),
    "deepspeed": ("ulysses_deepspeed_stage_1, _2 and _3", "zero"),
    "jsonargparse": ("LightningCLI and videoscale benchmark-shapes", "cli"),
    "tensorboard": ("Lightning's TensorBoardLogger", "tensorboard"),
    "matplotlib": ("pictures in TensorBoard", "tensorboard"),
}
"""What each optional package is for, and the extra that brings it."""


def examine() -> list[Finding]:
    """Looks at the packages, the GPUs and their links; starts nothing and changes nothing."""
    return [*_packages(), *_known_bad_packages(), *_gpus()]


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        findings = examine() if options.model is None else examine_model(options.model)
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    if options.json:
        sys.stdout.write(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2) + "\n")
    else:
        Console().print(_table(findings))
    return int(any(finding.status == "bad" for finding in findings))


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _REQUIRED:
        found = installed_version(name)
        if found is not None:
            yield Finding(name, "ok", found)
        elif name == "triton" and not torch.cuda.is_available():
            yield Finding(name, "missing", "not installed; kernels run as their reference in PyTorch")
        else:
            yield Finding(name, "bad", "not installed", f"pip install {name}")
    for name, (purpose, extra) in _OPTIONAL.items():
        found = installed_version(name)
        if found is not None:
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "missing", f"without it no {purpose}", f"pip install 'lightning-videoscale[{extra}]'")


def _known_bad_packages() -> Iterator[Finding]:
    lightning = installed_version("lightning")
    if lightning in ("2.6.2", "2.6.3"):
        yield Finding(
            "lightning",
            "bad",
            f"{lightning} was a malicious upload and has been withdrawn (GHSA-w37p-236h-pfx3)",
            "pip install 'lightning>=2.6.6', and replace the secrets that were on this machine",
        )
    elif lightning is not None and Version(lightning) < Version("2.6.6"):
        yield Finding(
            "lightning",
            "bad",
            f"{lightning} runs code from a checkpoint in load_from_checkpoint (GHSA-qqmf-gpg7-g8gw)",
            "pip install 'lightning>=2.6.6'",
        )
    if lightning is not None and installed_version("pytorch-lightning") is not None:
        yield Finding(
            "pytorch-lightning",
            "ok",
            "installed beside lightning; a Trainer imported from it does not know these strategies",
            "import lightning.pytorch as pl",
        )
    switched_off = os.environ.get("TORCHINDUCTOR_MIX_ORDER_REDUCTION") == "0"
    if torch.cuda.is_available() and mix_order_reduction_is_wrong() and not switched_off:
        yield Finding(
            "torch.compile",
            "bad",
            f"torch {torch.__version__} returns wrong or failing gradients of scale and shift in compiled AdaLN "
            "(mix-order reduction, pytorch #193061)",
            "export TORCHINDUCTOR_MIX_ORDER_REDUCTION=0",
        )


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("gpu", "missing", "no CUDA device is visible; strategies run on the CPU over gloo")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            f"gpu {index}",
            "ok",
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}",
        )
        yield _attention(index)
    yield Finding("cuda", "ok", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {_nccl()}")
    yield from _links(count) if count > 1 else ()
    for index in range(count):
        lacks = what_lacks("symmetric", torch.device("cuda", index))
        yield Finding(
            "symmetric memory",
            "missing" if lacks else "ok",
            f"gpu {index}: {lacks or 'torch and the driver have what it needs'}",
            "use transport='collective'" if lacks else "",
        )


def _attention(index: int) -> Finding:
    """The kernels of attention that a GPU has, and whether there is a faster one to install."""
    device = torch.device("cuda", index)
    usable = [name for name, kernel in KERNELS.items() if kernel.unusable(device) is None]
    found = f"gpu {index}: {', '.join(usable)}"
    if "flash_attn_4" in usable or needs_capability(device, (9, 0), most=11) is not None:
        return Finding("attention kernels", "ok", found)
    return Finding(
        "attention kernels",
        "slow",
        f"{found}; without FlashAttention 4, which took 0.83 to 0.89 of cuDNN's time for attention on an H200 "
        "(bfloat16, head dim 128, 16k to 76k tokens)",
        "pip install 'lightning-videoscale[flash]'",
    )


def _links(count: int) -> Iterator[Finding]:
    strangers = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if strangers:
        yield Finding(
            "peer access",
            "slow",
            f"no direct access between GPUs {strangers}; exchanges go through the host",
            "keep a sequence-parallel group on GPUs that reach each other; in a container or virtual machine, pass "
            "the links through",
        )
    else:
        yield Finding("peer access", "ok", f"all {count} GPUs reach each other")
    links = sorted(set(_link_types()))
    if links:
        nvlink = all(link.startswith("NV") for link in links)
        yield Finding(
            "links",
            "ok" if nvlink else "slow",
            f"between GPUs: {', '.join(links)} (nvidia-smi topo -m)",
            ""
            if nvlink
            else "keep a sequence-parallel group on GPUs joined by NVLink, or its exchanges cost PCIe time",
        )


def _link_types() -> Iterator[str]:
    """Yields what joins each pair of GPUs, as nvidia-smi calls it, such as NV18 or SYS."""
    if shutil.which("nvidia-smi") is None:
        return
    matrix = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    names = [cell for cell in rows[0] if re.fullmatch(r"GPU\d+", cell)] if rows else []
    for number, name in enumerate(names):
        row = next(row for row in rows[1:] if row and row[0] == name)
        yield from row[number + 2 : len(names) + 1]  # what stands right of the diagonal


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"


def _table(findings: list[Finding]) -> Table:
    colours = {"ok": "green", "missing": "dim", "slow": "yellow", "bad": "bold red"}
    table = Table(title="videoscale doctor", show_lines=False)
    for column in ("", "status", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(finding.subject, f"[{colour}]{finding.status}[/]", escape(finding.detail), escape(finding.remedy))
    return table
