"""qk_norm_rope's CUDA sources compile wherever a compiler is found; what they compute is tested on GPUs."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_videoscale.kernels.cuda.head_kernels import constants, stage_bytes, together, vectors
from lightning_videoscale.kernels.cuda.head_tuning import HeadTuning, tuning_for
from lightning_videoscale.kernels.cuda.row_variant import Direction
from lightning_videoscale.kernels.head_types import HeadOp, HeadVariant, Rotation
from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope
from tests.kernels.qk_oracle import Case

CSRC = Path(__file__).parents[2] / "csrc"
BF16, FP32 = torch.bfloat16, torch.float32
WAN, COSMOS = HeadOp("rms", False, "interleaved", False), HeadOp("rms", True, "half", True)
COGVIDEOX, ROTATION = HeadOp("layer", True, "interleaved", False), HeadOp("none", False, "interleaved", False)
VARIANTS: dict[str, tuple[HeadOp, torch.dtype, torch.dtype | None, bool, tuple[int, int], int, int, bool]] = {
    "Wan": (WAN, BF16, BF16, False, (12, 12), 128, 64, False),
    "Wan in diffusers": (WAN, BF16, BF16, False, (12, 12), 128, 64, False),
    "Wan 14B in diffusers": (WAN, BF16, FP32, False, (40, 40), 128, 64, False),
    "Wan 14B": (WAN, BF16, FP32, False, (40, 40), 128, 64, False),
    "cross-attention": (WAN, BF16, BF16, False, (24, 24), 128, 0, False),
    "LTX": (WAN, BF16, BF16, False, (32, 32), 64, 32, True),
    "LTX in diffusers": (WAN, BF16, BF16, False, (32, 32), 64, 32, True),
    "grouped queries, half": (COSMOS, BF16, BF16, False, (32, 8), 128, 64, False),
    "CogVideoX": (COGVIDEOX, torch.float16, torch.float16, True, (30, 30), 64, 32, False),
    "rotation alone": (ROTATION, FP32, None, False, (12, 12), 128, 64, False),
}


def variant(name: str, direction: Direction, outside: bool = False, sums_only: bool = False) -> HeadVariant:
    op, *rest = VARIANTS[name]
    if sums_only and direction == "forward":
        rest[-2] = 0  # Squares are summed before anything is rotated.
    tables = (2, (0, 1)) if "diffusers" in name else (1, (0, 0))
    return HeadVariant(op, direction, *rest, *tables, outside, sums_only)


def tuning_of(made: HeadVariant, shared_limit: int) -> HeadTuning | None:
    row = vectors(made), made.table_heads, stage_bytes(made)
    return tuning_for(made.direction, together(made), *row, shared_limit)


def test_a_stage_is_the_rows_and_the_tables() -> None:
    assert stage_bytes(variant("Wan", "forward")) == 2 * 12 * 128 * 2 + 2 * 64 * 4
    assert stage_bytes(variant("Wan", "backward")) == 2 * 12 * 128 * 2 + 2 * 64 * 4
    assert stage_bytes(variant("Wan in diffusers", "backward")) == 2 * 12 * 128 * 2 + 2 * 128 * 4
    assert stage_bytes(variant("grouped queries, half", "forward")) == 32 * 128 * 2 + 2 * 64 * 4
    assert stage_bytes(variant("cross-attention", "forward")) == 24 * 128 * 2
    assert stage_bytes(variant("LTX", "backward")) == 2 * 32 * 64 * 2 + 2 * 32 * 32 * 4
    assert stage_bytes(variant("rotation alone", "backward")) == 12 * 128 * 4 + 2 * 64 * 4


@pytest.mark.parametrize(("direction", "name"), itertools.product(["forward", "backward"], VARIANTS))
def test_tuning_fits_a_multiprocessor(direction: Direction, name: str) -> None:
    made = variant(name, direction)
    tuning = tuning_of(made, 227 * 1024 - 1024)
    assert tuning is not None
    assert tuning.threads % 32 == 0 and tuning.threads <= 1024 and tuning.stages >= 2
    assert tuning.blocks * (tuning.stages * stage_bytes(made) + 1024) <= 227 * 1024
    assert 192 <= tuning.blocks * tuning.threads <= 2048 and tuning.blocks <= 32


def test_no_tuning_where_two_rows_do_not_fit() -> None:
    assert tuning_for("backward", False, 6400, False, 200_000, 227 * 1024) is None


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("pairs", ["packed", "every second", "every second from the first", "transposed", "unlike"])
def test_variants_are_made_for_the_tables_that_are_read(pairs: str, heads: int) -> None:
    """A layout that the kernels cannot read is copied first, and takes no more shared memory for what it was."""
    channels = torch.randn(2, 300, heads, 64)
    packed = channels[..., :32].contiguous()
    cos, sin = {
        "packed": (packed, packed),
        "every second": (channels[..., ::2], channels[..., ::2]),
        "every second from the first": (channels[..., ::2], channels[..., 1::2]),
        "transposed": (packed.transpose(1, -1).contiguous().transpose(1, -1),) * 2,
        "unlike": (packed, channels[..., ::2]),
    }[pairs]
    given = Rotation(cos, sin, 0)
    read = given.readable()
    assert given.table_layout() == read.table_layout()
    assert (read is given) == (pairs not in ("transposed", "unlike"))


def test_refuses_the_cpu_by_name() -> None:
    arguments = Case().arguments(FP32)
    with pytest.raises(NotImplementedError, match="the tensors are on the cpu"):
        qk_norm_rope(*arguments.tensors, **arguments.options, backend="cuda")


IN_TURN = dict(zip(VARIANTS, itertools.cycle(["forward", "backward"]), strict=False))
COMPILED = [
    pytest.param(variant(name, direction), 90, marks=() if IN_TURN[name] == direction else pytest.mark.full)
    for name in VARIANTS
    for direction in ("forward", "backward")
]
COMPILED += [pytest.param(variant("Wan", direction), 100, marks=pytest.mark.full) for direction in IN_TURN.values()][:2]
COMPILED += [
    pytest.param(variant("Wan", "backward", outside=True)._replace(dx_sums=True), 90),
    pytest.param(variant("Wan", "forward", outside=True), 90, marks=pytest.mark.full),
    pytest.param(variant("Wan", "forward", sums_only=True), 90),
    pytest.param(variant("Wan", "backward", sums_only=True), 90),
    pytest.param(variant("Wan 14B in diffusers", "backward")._replace(dx_sums=True), 90),
    pytest.param(variant("Wan 14B in diffusers", "backward")._replace(dx_sums=True), 100, marks=pytest.mark.full),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("made", "arch"), COMPILED, ids=lambda value: str(value)[:70])
def test_compiles_without_spilling(made: HeadVariant, arch: int, tmp_path: Path) -> None:
    tuning = tuning_of(made, 226 * 1024)
    assert tuning is not None
    macros = constants(made) | tuning.constants()
    output = compile_cubin(f"qk_{made.direction}.cuh", macros, arch, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in output, output


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_finalize_compiles(tmp_path: Path) -> None:
    compile_cubin("qk_finalize.cuh", {"PARAMETER": "__nv_bfloat16"}, 90, tmp_path)


def compile_cubin(source: str, macros: dict[str, str | int], arch: int, folder: Path) -> str:
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "-x", "cu", *defines]
    done = subprocess.run([*command, str(CSRC / source), "-o", str(folder / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr
