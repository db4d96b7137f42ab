"""Norm outputs that backward computes again: the same gradients to the bit, and one activation less is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.kernels import gate_residual_norm_modulate, norm_modulate
from lightning_videoscale.kernels.recompute import recomputed, recomputed_in_graph

SHAPE = (2, 16, 32)
BYTES = 4 * 2 * 16 * 32


def leaves() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(SHAPE, generator=rng).requires_grad_() for _ in range(2))
    scale, shift = (torch.randn(2, 1, 32, generator=rng).requires_grad_() for _ in range(2))
    return [x, branch, scale, shift]


def kept_activations(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, Tensor]:
    """Activations of SHAPE that are kept for backward beside the inputs."""
    kept: dict[int, int] = {}
    given = {t.untyped_storage().data_ptr() for t in inputs}

    def keep(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in given and tensor.numel() >= tensor.new_empty(SHAPE).numel():
            kept[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return sum(kept.values()) / BYTES, result


def test_eager() -> None:
    projections = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))
    x, branch, scale, shift = inputs = leaves()
    counted: list[int] = []

    def plain() -> Tensor:
        _, y = gate_residual_norm_modulate(x, branch, scale, scale, shift)
        return sum(p(y) for p in projections)  # type: ignore[return-value]

    def again() -> Tensor:
        h, y = gate_residual_norm_modulate(x, branch, scale, scale, shift)

        def recipe() -> Tensor:
            counted.append(1)
            return norm_modulate(h, scale, shift)

        with recomputed(y, recipe):
            return sum(p(y) for p in projections)  # type: ignore[return-value]

    parameters = [*inputs, *projections.parameters()]
    weights = [p.weight for p in projections]  # type: ignore[union-attr]
    (without, expected), (with_recipe, result) = (kept_activations(f, [*inputs, *weights]) for f in (plain, again))
    assert (without, with_recipe) == (2, 1)  # h and y; h
    theirs, ours = (torch.autograd.grad(o.square().sum(), parameters) for o in (expected, result))
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert 1 <= len(counted) <= 3


def test_compiled() -> None:
    projection = nn.Linear(32, 32)
    x, _, scale, shift = inputs = leaves()

    def plain(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return projection(norm_modulate(x.sin(), scale, shift)).cos()

    def again(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return projection(recomputed_in_graph(norm_modulate, x.sin(), scale, shift)).cos()

    results = []
    for function in (plain, again):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        kept, output = kept_activations(lambda c=compiled: c(x, scale, shift), [*inputs, projection.weight])  # type: ignore[misc]
        results.append((kept, torch.autograd.grad(output.square().sum(), [x, scale, shift, projection.weight])))
    (without, theirs), (with_recipe, ours) = results
    assert without - with_recipe == 1
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
