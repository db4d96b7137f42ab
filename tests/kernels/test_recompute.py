"""Norm outputs that backward computes again: the same gradients to the bit, and one activation less is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.kernels import gate_residual_norm_modulate, norm_modulate
from lightning_videoscale.kernels.recompute import recomputed, run_norm

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


@dataclass
class Eager:
    """Three projections of a seam's y, which is recomputed from h; and what became of y."""

    inputs: list[Tensor] = field(default_factory=leaves)
    recomputed: int = 0
    y: StorageWeakRef | None = None
    projections: nn.ModuleList = field(default_factory=lambda: nn.ModuleList(nn.Linear(32, 8) for _ in range(3)))

    def forward(self, recompute: bool) -> Tensor:
        x, branch, scale, shift = self.inputs
        h, y = gate_residual_norm_modulate(x, branch, scale, scale, shift)

        def recipe() -> Tensor:
            self.recomputed += 1
            return norm_modulate(h, scale, shift)

        with recomputed(y, recipe, recompute=recompute):
            result = torch.stack([projection(y) for projection in self.projections]).sum(0)
        self.y = StorageWeakRef(y.untyped_storage())
        return result

    def gradients(self, result: Tensor, retain: bool = False) -> tuple[Tensor, ...]:
        wanted = [*self.inputs, *self.projections.parameters()]
        return torch.autograd.grad(result.square().sum(), wanted, retain_graph=retain)

    @property
    def kept(self) -> bool:
        assert self.y is not None
        return not self.y.expired()


def test_eager() -> None:
    eager = Eager()
    plain = eager.forward(recompute=False)
    assert eager.kept
    expected = eager.gradients(plain)
    result = eager.forward(recompute=True)
    assert not eager.kept
    assert all(torch.equal(a, b) for a, b in zip(eager.gradients(result), expected, strict=True))
    assert eager.recomputed == 1  # once for three projections


def test_a_graph_that_is_retained_recomputes_in_every_backward() -> None:
    eager = Eager()
    result = eager.forward(recompute=True)
    first, second = (eager.gradients(result, retain=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert eager.recomputed == 2


def test_inside_other_hooks_it_leaves_everything_to_them() -> None:
    eager = Eager()
    expected = eager.gradients(eager.forward(recompute=False))
    with torch.autograd.graph.save_on_cpu():
        result = eager.forward(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(eager.gradients(result), expected, strict=True))
    result = checkpoint(eager.forward, True, use_reentrant=False)
    assert not eager.kept
    assert all(torch.equal(a, b) for a, b in zip(eager.gradients(result), expected, strict=True))
    assert eager.recomputed == 0


def test_several_outputs_and_nested_contexts() -> None:
    x, branch, scale, shift = leaves()
    counted: list[str] = []

    def norms(name: str, *inputs: Tensor) -> list[Tensor]:
        counted.append(name)
        return [norm_modulate(x, scale, shift) for x in inputs]

    def forward(recompute: bool) -> tuple[Tensor, list[StorageWeakRef]]:
        a, b = norms("", x, branch)
        with recomputed((a, b), partial(norms, "outer", x, branch), recompute=recompute):
            (c,) = norms("", branch.sin())
            with recomputed(c, partial(norms, "inner", branch.sin()), recompute=recompute):
                result = a * b * c
        return result, [StorageWeakRef(t.untyped_storage()) for t in (a, b, c)]

    plain, _ = forward(False)
    expected = torch.autograd.grad(plain.sum(), [x, branch, scale, shift])
    result, storages = forward(True)
    assert all(storage.expired() for storage in storages)
    counted.clear()
    gradients = torch.autograd.grad(result.sum(), [x, branch, scale, shift])
    assert counted == ["inner", "outer"]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_compiled() -> None:
    projection = nn.Linear(32, 32)
    x, _, scale, shift = inputs = leaves()

    def plain(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return projection(norm_modulate(x.sin(), scale, shift)).cos()

    def again(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return projection(run_norm(norm_modulate, x.sin(), scale, shift, recompute=True)).cos()

    results = []
    for function in (plain, again):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        kept, output = kept_activations(lambda c=compiled: c(x, scale, shift), [*inputs, projection.weight])  # type: ignore[misc]
        results.append((kept, torch.autograd.grad(output.square().sum(), [x, scale, shift, projection.weight])))
    (without, theirs), (with_recipe, ours) = results
    assert without - with_recipe == 1
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
