"""What modules hold, and what is called around all of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from lightning_videoscale.compat.torch.modules import attributes_beside_parameters, has_global_hooks


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
