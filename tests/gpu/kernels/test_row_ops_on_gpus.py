"""The row operations on a GPU: every backend that runs there, against a float64 oracle.

Most of the time kernels are compiled, by the host: ``pytest -n 12 --dist worksteal`` makes use of its cores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_videoscale import kernels
from lightning_videoscale.kernels import norm_modulate
from lightning_videoscale.kernels.row_ops import RowCall
from tests.kernels.row_cases import Case, all_variants, assert_close_to_oracle, gradients

pytestmark = pytest.mark.gpu
BACKENDS = ["reference", "triton", "cuda"]
WIDTHS = [64, 1152, 1536, 1920, 2240, 2432, 3072, 5120, 5376]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", range(8))
def test_every_variant(part: int, backend: str, dtype: torch.dtype) -> None:
    for case in all_variants()[part::8]:
        modulation = torch.float32 if dtype is torch.float32 else dtype
        assert_close_to_oracle(replace(case, dtype=dtype, modulation_dtype=modulation), backend, "cuda")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7, 7 * 293])
def test_real_widths_and_many_rows(backend: str, d: int, rows: int) -> None:
    """More rows than programs, with groups that end inside a program's rows; per token at last."""
    case = Case(b=2, s=7 * 293, d=d, rows=rows, tables=True)
    if backend == "cuda" and rows == case.s and d >= 5120:  # six inputs of 4 bytes, two rows of each at a time
        with pytest.raises(NotImplementedError, match="must fit in a block's shared memory"):
            assert_close_to_oracle(case, backend, "cuda")
    else:
        assert_close_to_oracle(case, backend, "cuda")
    assert_close_to_oracle(replace(case, dtype=torch.bfloat16, modulation_dtype=torch.bfloat16), backend, "cuda")


@pytest.mark.parametrize("operation", ["norm_modulate", "gate_residual", "gate_residual_norm_modulate"])
@pytest.mark.parametrize("d", [8184, 16384])
def test_rows_so_wide_that_few_are_under_way_at_once(d: int, operation: str) -> None:
    """What CUDA cannot hold in shared memory runs on Triton."""
    for rows in (1, 293):
        assert_close_to_oracle(Case(operation, s=293, d=d, rows=rows, tables=True), "triton", "cuda")
        assert_close_to_oracle(Case(operation, s=293, d=d, rows=rows, tables=True), "auto", "cuda")


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("operation", ["norm_modulate", "fork_norm_modulate", "gate_residual_norm_modulate"])
def test_wide_rows_with_values_of_their_own_fit_shared_memory(operation: str, affine: bool) -> None:
    """Each row reads the norm's bias again, and takes room for it."""
    d, rows = 8184, 37
    t = Case(s=rows, d=d, rows=rows, affine=affine, tables=True).tensors("cuda")
    if operation != "gate_residual_norm_modulate":
        of_branch = ("residual", "branch", "branch_bias", "gate", "gate_table")
        t = {"x": t["residual"]} | {name: x for name, x in t.items() if name not in of_branch}
    t = {name: x for name, x in t.items() if x is not None}
    function: Any = getattr(kernels, operation)
    found = []
    for backend in ("triton", "reference"):
        outputs = function(**t, eps=1e-6, backend=backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found.append(torch.autograd.grad(sum(out.square().mean() for out in outputs), list(t.values())))
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("indexed", [False, True])
def test_repeats_to_the_bit(backend: str, indexed: bool) -> None:
    case = Case(b=2, s=4096, d=1536, rows=4096 if indexed else 4, indexed=indexed, tables=True, affine=True)
    t = case.tensors("cuda")
    runs = [gradients(case.run(t, backend), t) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_diffusers_expression(backend: str, dtype: torch.dtype, rows: int) -> None:
    """To the bit on the reference; elsewhere sums in another order may flip a rounding here and there."""
    torch.manual_seed(0)
    x = (torch.randn(2, 4096, 1536, device="cuda") * 2).to(dtype)
    scale, shift = (torch.randn(2, rows, 1536, device="cuda") for _ in range(2))
    eager = (torch.nn.functional.layer_norm(x.float(), (1536,), eps=1e-6) * (1 + scale) + shift).type_as(x)
    fused: Any = norm_modulate(x, scale, shift, eps=1e-6, backend=backend)  # type: ignore[arg-type]
    if backend == "reference":
        assert torch.equal(fused, eager)
    elif dtype is torch.float32:
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-5)
    else:
        assert (fused != eager).float().mean() < 0.01
        torch.testing.assert_close(fused, eager)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Per-token modulation is a chunk of (1, S, 6, D): its rows lie beyond what 32 bits can address."""
    s, d = 131072, 3072
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    modulation = torch.empty(1, s, 6, d, device="cuda", dtype=torch.bfloat16)
    modulation[:, -4:].normal_()
    x = torch.empty(1, s, d, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    scale, shift = modulation[:, :, 4], modulation[:, :, 5]
    y = norm_modulate(x, scale, shift, backend=backend)  # type: ignore[arg-type]
    tail = norm_modulate(x[:, -4:], scale[:, -4:], shift[:, -4:], backend="reference")
    torch.testing.assert_close(y[:, -4:], tail)


def test_opcheck() -> None:
    t: Any = Case("norm_modulate").tensors("cuda")
    torch.library.opcheck(torch.ops.lightning_videoscale.norm_modulate.default, RowCall(**t, norm="layer"))
