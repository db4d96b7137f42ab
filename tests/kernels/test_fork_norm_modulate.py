"""`fork_norm_modulate`: the norm of a residual stream, and the stream itself, whose gradients are added inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_videoscale.kernels import fork_norm_modulate, gate_residual, norm_modulate
from tests.kernels.op_calls import assert_no_graph_break
from tests.kernels.row_cases import Case, relative_error


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.float().sin().sum() + y.float().cos().sum()


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_is_norm_modulate_with_one_gradient_less_to_round(dtype: torch.dtype, rows: int) -> None:
    t: Any = Case("norm_modulate", rows=rows, affine=True, tables=True, dtype=dtype).tensors()
    x, y = fork_norm_modulate(**t)
    assert x.data_ptr() == t["x"].data_ptr() and torch.equal(y, norm_modulate(**t))
    leaves = list(t.values())
    ours = torch.autograd.grad(loss(x, y), leaves)
    apart = torch.autograd.grad(loss(t["x"], norm_modulate(**t)), leaves)
    exact: Any = {name: leaf.detach().double().requires_grad_() for name, leaf in t.items()}
    truth = torch.autograd.grad(loss(exact["x"], norm_modulate(**exact)), list(exact.values()))
    # The loss itself takes sines in float32.
    for mine, other, true in zip(ours, apart, truth, strict=True):
        assert relative_error(mine, true) <= 1.05 * relative_error(other, true) + 1e-6


@pytest.mark.parametrize("used", ["x", "y"])
def test_one_of_them_unused(used: str) -> None:
    t: Any = Case("norm_modulate").tensors()
    x, y = fork_norm_modulate(**t)
    (ours,) = torch.autograd.grad((x if used == "x" else y).sin().sum(), t["x"])
    (expected,) = torch.autograd.grad((t["x"] if used == "x" else norm_modulate(**t)).sin().sum(), t["x"])
    torch.testing.assert_close(ours, expected)


def test_frozen_x_and_empty_x() -> None:
    t: Any = Case("norm_modulate").tensors()
    t["x"].requires_grad_(False)
    fork_norm_modulate(**t)[1].sum().backward()
    assert t["x"].grad is None and t["scale"].grad is not None
    x, y = fork_norm_modulate(torch.empty(0, 3, 8, requires_grad=True))
    assert x.shape == y.shape == (0, 3, 8)
    with pytest.raises(ValueError, match="shift needs a scale"):
        fork_norm_modulate(torch.ones(1, 2, 8), shift=torch.ones(1, 1, 8))


def test_compiled_without_a_graph_break() -> None:
    def block(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        h, y = fork_norm_modulate(x, scale, shift)
        return gate_residual(h, y.square(), shift)

    t: Any = Case("norm_modulate").tensors()
    assert_no_graph_break(block, [t["x"], t["scale"], t["shift"]])
