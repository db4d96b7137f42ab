"""The CUDA sources compile for every architecture; the cache compiles each variant once, whoever asks."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_videoscale.kernels.cuda import compile as nvrtc
from lightning_videoscale.kernels.cuda import sources, toolkit
from lightning_videoscale.kernels.cuda.row_tuning import tuning_for
from lightning_videoscale.kernels.cuda.row_variant import Variant
from lightning_videoscale.kernels.row_types import RowOp

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
VARIANTS = {
    "per sample": Variant(RowOp("layer"), 5120, BF16, None, None, F32, None, F32, None, None, None, False, False),
    "tables, affine, index": Variant(
        RowOp("layer", True, "identity", branch_sum=True),
        2240,
        F32,
        BF16,
        F32,
        BF16,
        F32,
        BF16,
        F32,
        F16,
        F16,
        False,
        True,
        True,
    ),
    "per token, eager, norm of the branch": Variant(
        RowOp("rms", True, "tanh", True, "eager", branch_sum=True),
        1152,
        F16,
        F32,
        None,
        F32,
        None,
        None,
        None,
        F32,
        None,
        True,
        False,
    ),
    "only the branch's bias": Variant(
        RowOp("layer", True, sums=False, branch_sum=True),
        1536,
        BF16,
        *[None] * 8,
        False,
        False,
        True,  # type: ignore[arg-type]
    ),
    "no norm": Variant(RowOp(None, True, "identity"), 64, BF16, F32, *[None] * 7, False, False, True),  # type: ignore[arg-type]
}


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_every_source_compiles(capability: tuple[int, int], name: str, tmp_path: Path) -> None:
    assert NVCC is not None
    variant, arch = VARIANTS[name], f"sm_{capability[0]}{capability[1]}"
    supported = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True).stdout
    if arch not in supported:
        pytest.skip(f"this nvcc does not know {arch}")
    for direction in ("forward", "backward"):
        tuning = tuning_for(variant, direction, capability, 160 * 1024)
        assert tuning is not None
        text = "".join(f'#include "{f}.cuh"\n' for f in [f"rows_{direction}"])
        (tmp_path / f"{direction}.cu").write_text(text)
        defines = [f"-D{macro}={value}" for macro, value in (variant.constants() | tuning.constants()).items()]
        _compile(NVCC, arch, defines, tmp_path / f"{direction}.cu")
    (tmp_path / "finalize.cu").write_text('#include "rows_finalize.cuh"\n')
    _compile(NVCC, arch, defines, tmp_path / "finalize.cu")


@pytest.mark.parametrize("name", VARIANTS)
def test_nvrtc_compiles_what_nvcc_does(name: str, tmp_path: Path) -> None:
    try:
        toolkit.nvrtc_version(), toolkit.include_folder()
    except toolkit.CudaUnavailableError as reason:
        pytest.skip(str(reason))
    variant = VARIANTS[name]
    for direction in ("forward", "backward"):
        tuning = tuning_for(variant, direction, (9, 0), 160 * 1024)
        assert tuning is not None
        constants = variant.constants() | tuning.constants()
        assert nvrtc.cubin(f"rows_{direction}.cuh", constants, "sm_90", folder=tmp_path)
    assert nvrtc.cubin("rows_finalize.cuh", constants, "sm_90", folder=tmp_path)


def _compile(nvcc: str, arch: str, defines: list[str], path: Path) -> None:
    csrc = Path(sources.__file__).parents[2] / "csrc"
    command = [nvcc, "-std=c++17", f"-arch={arch}", "-cubin", f"-I{csrc}", *defines, "-o", f"{path}.cubin", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, by a stand-in for NVRTC that takes a moment."""
    done: list[str] = []

    def compile_(source: str, texts: object, constants: object, arch: str) -> bytes:
        threading.Event().wait(0.2)
        done.append(source)
        return f"{source} {constants} {arch}".encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(toolkit, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(toolkit, "headers_digest", lambda: "headers")
    return done


def _at_once(run: Callable[[], object], times: int) -> None:
    threads = [threading.Thread(target=run) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_compiles_while_others_wait(compilations: list[str], tmp_path: Path) -> None:
    got: list[bytes] = []
    _at_once(lambda: got.append(nvrtc.cubin("rows_forward.cuh", {"D": 64}, "sm_90", folder=tmp_path)), times=6)
    assert compilations == ["rows_forward.cuh"]
    assert got == [b"rows_forward.cuh {'D': 64} sm_90"] * 6


def test_whatever_differs_is_compiled_anew(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(constants: dict[str, str | int], arch: str = "sm_90") -> int:
        nvrtc.cubin("rows_forward.cuh", constants, arch, folder=tmp_path)
        return len(compilations)

    assert [compiled({"D": 64}), compiled({"D": 64}), compiled({"D": 72}), compiled({"D": 64}, "sm_80")] == [1, 1, 2, 3]
    monkeypatch.setattr(toolkit, "nvrtc_version", lambda: "13.1")
    assert compiled({"D": 64}) == 4
    texts = {**sources.with_includes("rows_forward.cuh"), "vectors.cuh": "// changed"}
    monkeypatch.setattr(sources, "with_includes", lambda name: texts)
    assert compiled({"D": 64}) == 5


def test_waiting_ends(compilations: list[str], tmp_path: Path) -> None:
    nvrtc.cubin("rows_forward.cuh", {}, "sm_90", folder=tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    cubin.unlink()
    with cubin.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="Another process has held"):
            nvrtc.cubin("rows_forward.cuh", {}, "sm_90", folder=tmp_path, timeout=0.2)


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "/somewhere")
    assert nvrtc.cache_folder() == Path("/somewhere")
    monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert nvrtc.cache_folder() == Path("/caches/lightning_videoscale")


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "_include_candidates", lambda: [tmp_path])
    with pytest.raises(toolkit.CudaUnavailableError, match=r"cuda_bf16\.h.*found in none of") as raised:
        toolkit.include_folder.__wrapped__()
    assert str(tmp_path) in str(raised.value)


def test_a_source_comes_with_all_that_it_includes() -> None:
    texts = sources.with_includes("rows_finalize.cuh")
    assert next(iter(texts)) == "rows_finalize.cuh"
    included = {
        "async_copy.cuh",
        "dependent_launch.cuh",
        "row_sums.cuh",
        "row_walk.cuh",
        "row_config.cuh",
        "vectors.cuh",
    }
    assert set(texts) == {"rows_finalize.cuh"} | included
