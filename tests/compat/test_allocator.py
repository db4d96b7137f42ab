"""Segments of CUDA's memory grow, unless the user has set up the allocator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_videoscale.compat.torch import TORCH
from lightning_videoscale.compat.torch.allocator import expand_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OF_THE_USER = "max_split_size_mb:128"

settings = TORCH.function("torch._C", "_accelerator_getAllocatorSettings")
change = TORCH.function("torch._C", "_accelerator_setAllocatorSettings")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    before = settings()
    change("")
    yield
    change(before)


def test_segments_grow_where_nothing_is_set() -> None:
    assert expand_segments()
    assert settings() == "expandable_segments:True"
    assert not expand_segments()  # once is enough


@pytest.mark.parametrize("name", NAMES)
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, OF_THE_USER)
    assert not expand_segments()
    assert settings() == ""


def test_what_was_set_in_this_process_stays() -> None:
    change(OF_THE_USER)
    assert not expand_segments()
    assert settings() == OF_THE_USER
