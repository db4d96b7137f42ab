"""Segments of CUDA's memory grow, unless the user has set up the allocator."""

from __future__ import annotations

import pytest

from lightning_videoscale.compat.torch import TORCH
from lightning_videoscale.compat.torch.allocator import expand_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", [None, *NAMES])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    before = "max_split_size_mb:128"
    TORCH.get("torch._C", "_accelerator_setAllocatorSettings")(before)
    if name is not None:
        monkeypatch.setenv(name, before)
    assert expand_segments() == (name is None)
    now = TORCH.get("torch._C", "_accelerator_getAllocatorSettings")()
    assert now == ("expandable_segments:True" if name is None else before)
