"""What modules hold, and what is called around all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from lightning_videoscale.compat.torch.modules import attributes_beside_parameters, has_global_hooks, with_children


def test_hooks_of_all_modules_are_noticed() -> None:
    assert not has_global_hooks()
    for register in (
        torch_modules.register_module_forward_pre_hook,
        torch_modules.register_module_forward_hook,
        torch_modules.register_module_full_backward_pre_hook,
        torch_modules.register_module_full_backward_hook,
    ):
        hook = register(lambda *_: None)
        assert has_global_hooks()
        hook.remove()
    assert not has_global_hooks()


def test_attributes_beside_parameters() -> None:
    module: Any = nn.BatchNorm1d(2)
    module.scale = 2.0
    held = attributes_beside_parameters(module)
    assert {"scale", "eps", "training"} < held.keys()
    mappings = [value for value in held.values() if isinstance(value, dict)]
    assert not any(value is module.weight for mapping in mappings for value in mapping.values())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.factor = nn.Linear(2, 2), nn.ReLU(), 3
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(x)) * self.factor * self.weight + self.shift
        return result


def test_a_module_with_other_children_shares_the_rest() -> None:
    module, identity = Scaled(), nn.Identity()
    before = dict(vars(module)), dict(module.named_children())
    other: Any = with_children(module, {"inner": identity}, list(vars(module)), factor=10, no_such=1)
    assert type(other) is Scaled
    assert dict(other.named_children()) == {"inner": identity, "last": module.last}
    assert other.weight is module.weight and other.shift is module.shift
    assert (other.factor, module.factor) == (10, 3) and not hasattr(other, "no_such")
    assert other(torch.full((2,), 2.0)).tolist() == [21.0, 21.0]
    assert (dict(vars(module)), dict(module.named_children())) == before


def test_such_a_module_is_made_in_compiled_code() -> None:
    module, names = Scaled(), list(vars(Scaled()))

    def program(x: Tensor) -> Tensor:
        return with_children(module, {"inner": nn.Identity()}, names, factor=10)(x)

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    assert compiled(torch.full((2,), 2.0)).tolist() == [21.0, 21.0]
