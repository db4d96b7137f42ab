"""FlashAttention 2, 3 and 4, as far as they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from lightning_videoscale.compat import flash_attn

MODULES = {
    2: ("flash_attn", "flash-attn"),
    3: ("flash_attn_interface", "flash-attn-3"),
    4: ("flash_attn", "flash-attn-4"),
}


@pytest.mark.parametrize("generation", MODULES)
def test_what_is_not_installed_is_named(generation: int) -> None:
    module, package = MODULES[generation]
    if find_spec(module) is not None:
        pytest.skip(f"{module} is there")
    assert package in (flash_attn.missing(generation) or "").split()
