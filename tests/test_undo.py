"""Undo: the latest change first, and once."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_videoscale.undo import Undo


def test_the_latest_change_is_taken_back_first_and_once() -> None:
    steps: list[str] = []
    undo = Undo(lambda: steps.append("first"))
    undo.add(lambda: steps.append("second"))
    undo()
    undo()
    assert steps == ["second", "first"]


def test_attributes_come_back_or_go() -> None:
    module = nn.Linear(2, 2)
    module.own = "before"  # type: ignore[assignment]
    undo = Undo()
    for name in ("own", "forward", "own"):
        undo.set(module, name, lambda x: x)
    assert {"own", "forward"} < vars(module).keys()
    undo()
    assert module.own == "before" and "forward" not in vars(module)


def test_a_step_that_fails_is_tried_again() -> None:
    module = nn.Linear(2, 2)
    undo = Undo()
    undo.set(module, "training", False)
    obstacles = ["sharded"]

    def refuse() -> None:
        if obstacles:
            raise RuntimeError(obstacles[0])

    undo.add(refuse)
    with pytest.raises(RuntimeError, match="sharded"):
        undo()
    assert not module.training
    obstacles.clear()
    undo()
    assert module.training
