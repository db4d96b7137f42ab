"""No launch of a Triton kernel takes more shared memory than a GPU has, compiled for GPUs that are not here."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightning_videoscale.kernels.row_types import Operand, RowInputs, RowMap, RowOp, variant_of

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from lightning_videoscale.kernels.triton import group_sums, rows
from tests.kernels.compiled_triton import compiled_for

GPUS = {90: 227 << 10, 89: 99 << 10}  # H100 and H200; L4 and RTX 40


def affine_inputs(d: int, *, branch: bool, dtype: torch.dtype) -> RowInputs:
    """A row each of everything that the operations take."""
    x, row = torch.zeros(2, d, dtype=dtype), torch.zeros(d)
    operand = Operand(torch.zeros(2, d), row)
    statistics: Any = (torch.zeros(2), torch.zeros(2))
    gated = (x, operand) if branch else (None, None)
    return RowInputs(x, *gated, operand, None, row, row, RowMap(2, 1), 1e-6, *statistics)


def most_taken(arch: int, shared_bytes: int, d: int, branch: bool) -> int:
    op = RowOp("layer", residual=branch, gate="identity" if branch else None)
    inputs = affine_inputs(d, branch=branch, dtype=torch.float32)
    gradient = torch.zeros_like(inputs.x)
    with compiled_for(arch, shared_bytes, rows, group_sums) as taken:
        rows.backward(variant_of(op, inputs), inputs, gradient, gradient)
    return taken["backward.backward_kernel"]


def test_rows_under_way_fit_a_small_gpu() -> None:
    """As D = 8184 does on a large one, and compiled in less time."""
    assert 4 * 4 * 1024 <= most_taken(90, 32 << 10, 1024, branch=False) <= 32 << 10


@pytest.mark.full
@pytest.mark.parametrize(("d", "branch"), [(8184, False), (8184, True), (5120, True)])
@pytest.mark.parametrize("arch", GPUS)
def test_rows_under_way_fit_real_gpus(arch: int, d: int, branch: bool) -> None:
    assert 0 < most_taken(arch, GPUS[arch], d, branch) <= GPUS[arch]
