"""Streams of random numbers by place in the run."""

from __future__ import annotations

import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from lightning_videoscale.strategies.generators import generator_states, seed_generators, set_generator_states

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_a_place_is_a_stream_whatever_was_drawn_before() -> None:
    seed_generators(7, "train", 0, 3)
    first = [draw() for _ in range(3)]
    draw()
    seed_generators(7, "train", 0, 3)
    assert [draw() for _ in range(3)] == first
    for other in ((7, "train", 0, 4), (7, "train", 1, 3), (7, "validate", 0, 3), (8, "train", 0, 3)):
        seed_generators(*other)
        assert not set(draw()) & set(first[0])


def test_states_come_back() -> None:
    seed_generators(1, "somewhere")
    states = generator_states(CPU)
    drawn = draw()
    set_generator_states(states, CPU)
    assert draw() == drawn


def test_torch_names_the_seed_as_it_does_after_manual_seed() -> None:
    """Workers of a DataLoader and saved runs ask for it."""
    seed_generators(2, "here")
    seed = torch.initial_seed()
    mine = torch.rand(4)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(4), mine)


def test_no_stack_is_written_down_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` does, some three times a call."""
    written: list[int] = []
    format_stack = traceback.format_stack

    def noting(*arguments: Any, **settings: Any) -> list[str]:
        written.append(1)
        return format_stack(*arguments, **settings)

    if torch.cuda.is_available():
        torch.cuda.init()  # as a strategy has, before it trains
    monkeypatch.setattr(traceback, "format_stack", noting)
    seed_generators(3, "train", 0, 0)
    assert not written
