"""The CUDA sources compile for every architecture; the cache compiles each variant once, whoever asks."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from lightning_videoscale.kernels.cuda import compile as nvrtc
from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.row_tuning import tuning_for
from lightning_videoscale.kernels.cuda.row_variant import constants
from lightning_videoscale.kernels.row_types import RowOp, RowVariant

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
VARIANTS = {
    "per sample": RowVariant(RowOp("layer"), 5120, BF16, modulation=F32, scale=True, shift=True),
    "tables, affine, index": RowVariant(
        RowOp("layer", True, "identity", branch_sum=True), 2240, F32, F32, BF16, F32, F16,
        scale=True, shift=True, bias=True, indexed=True, has_dh=True,
    ),
    "per token, eager, norm of the branch": RowVariant(
        RowOp("rms", True, "tanh", True, "eager", branch_sum=True), 1152, F16, F16, F32, None, F32,
        scale=True, per_row=True,
    ),
    "only the branch's bias": RowVariant(
        RowOp("layer", True, sums=False, branch_sum=True), 1536, BF16, BF16, has_dh=True
    ),
    "no norm": RowVariant(RowOp(None, True, "identity"), 64, BF16, BF16, F32, has_dh=True),
}  # fmt: skip
CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
BY_TURNS = [
    # Every variant for one architecture, in turn; for all of them with the full suite.
    pytest.param(name, capability, marks=() if (i - j) % 3 == 0 else pytest.mark.full)
    for i, name in enumerate(VARIANTS)
    for j, capability in enumerate(CAPABILITIES)
]


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.parametrize(("name", "capability"), BY_TURNS)
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
        defines = [f"-D{macro}={value}" for macro, value in (constants(variant) | tuning.constants()).items()]
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
        macros = constants(variant) | tuning.constants()
        assert nvrtc.cubin(f"rows_{direction}.cuh", macros, "sm_90", folder=tmp_path)
    assert nvrtc.cubin("rows_finalize.cuh", macros, "sm_90", folder=tmp_path)


def _compile(nvcc: str, arch: str, defines: list[str], path: Path) -> None:
    command = [
        nvcc,
        "-std=c++17",
        f"-arch={arch}",
        "-cubin",
        f"-I{nvrtc.sources()}",
        *defines,
        "-o",
        f"{path}.cubin",
        str(path),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_one_process_compiles_while_others_wait(tmp_path: Path) -> None:
    made, got = list[str](), list[bytes]()

    def make() -> bytes:
        threading.Event().wait(0.2)
        made.append("once")
        return b"machine code"

    def run() -> None:
        got.append(nvrtc.cached(tmp_path / "deep" / "a.cubin", make, timeout=60))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["once"] and got == [b"machine code"] * 6


def test_waiting_ends(tmp_path: Path) -> None:
    with (tmp_path / "a.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            nvrtc.cached(tmp_path / "a.cubin", bytes, timeout=0.2)


def test_a_cache_that_cannot_be_written_is_known_before_anything_is_compiled(tmp_path: Path) -> None:
    nvrtc.check_cache("sm_90", tmp_path / "new")
    assert not [*(tmp_path / "new").iterdir()]
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "folder", Path("/proc/nothing/here")):
        with pytest.raises(toolkit.CudaUnavailableError, match=nvrtc.CACHE_VARIABLE):
            nvrtc.check_cache("sm_90", folder)


def test_an_architecture_that_nvrtc_does_not_know_is_refused() -> None:
    try:
        toolkit.nvrtc_version()
    except toolkit.CudaUnavailableError as reason:
        pytest.skip(str(reason))
    toolkit.check_architecture("sm_90")
    with pytest.raises(toolkit.CudaUnavailableError, match="sm_35"):
        toolkit.check_architecture("sm_35")


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


def test_what_cannot_be_kept_or_read_is_compiled_by_each_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "folder.cubin").mkdir()
    for path in (file / "a.cubin", tmp_path / "folder.cubin"):
        made: list[bytes] = []

        def make(made: list[bytes] = made) -> bytes:
            made.append(b"code")
            return made[-1]

        caplog.clear()
        assert nvrtc.cached(path, make, timeout=1) == b"code"
        assert len(made) == 1 and nvrtc.CACHE_VARIABLE in caplog.text
