"""Segments of CUDA's memory grow, unless the user has set up the allocator; NCCL then registers nothing of graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lightning_videoscale.compat.torch import TORCH
from lightning_videoscale.compat.torch.allocator import expand_segments, refuse_registered_graphs

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OF_THE_USER = "max_split_size_mb:128"
REGISTER = "NCCL_GRAPH_REGISTER"

settings = TORCH.function("torch._C", "_accelerator_getAllocatorSettings")
change = TORCH.function("torch._C", "_accelerator_setAllocatorSettings")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, REGISTER):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    before = settings()
    change("")
    yield
    change(before)


def test_segments_grow_where_nothing_is_set() -> None:
    assert expand_segments()
    assert settings() == "expandable_segments:True"
    assert not expand_segments()  # once is enough
    assert os.environ[REGISTER] == "0"
    refuse_registered_graphs()


@pytest.mark.parametrize("name", NAMES)
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, OF_THE_USER)
    assert not expand_segments()
    assert settings() == "" and REGISTER not in os.environ
    refuse_registered_graphs()


def test_what_was_set_in_this_process_stays() -> None:
    change(OF_THE_USER)
    assert not expand_segments()
    assert settings() == OF_THE_USER


@pytest.mark.parametrize("name", NAMES)
def test_a_user_who_lets_segments_grow_hears_that_graphs_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments: True")
    assert not expand_segments()
    assert os.environ[REGISTER] == "0"
    refuse_registered_graphs()

    monkeypatch.setenv(REGISTER, "1")
    assert not expand_segments()
    with pytest.raises(ValueError, match="NCCL_GRAPH_REGISTER=1 and expandable_segments:True"):
        refuse_registered_graphs()


def test_who_wants_graphs_registered_keeps_segments_of_fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTER, "1")
    assert not expand_segments()
    assert settings() == "" and os.environ[REGISTER] == "1"
    refuse_registered_graphs()
