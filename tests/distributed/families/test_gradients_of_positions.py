"""Gradients of positions, from which rotary tables are made, are those of one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import HIDING
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.test_auto_schedule import clock
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
LTX = Case("ltx", (1, 1, 2), {"coordinates": True})


def gradient(model: nn.Module) -> Tensor:
    inputs = FAMILIES["ltx"].inputs(LTX, 0)
    positions = inputs["video_coords"].clone().requires_grad_()
    _, loss = run(model, {**inputs, "video_coords": positions})
    (found,) = torch.autograd.grad(loss, [positions])
    return found


def error(folder: Path | None) -> float:
    """By the schedule "serial", or by one that measurements would choose if no positions required gradients."""
    whole, split = FAMILIES["ltx"].model(LTX), FAMILIES["ltx"].model(LTX)
    schedules = ScheduleChoices("serial") if folder is None else ScheduleChoices(folder=folder, clock=clock("sliced"))
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        parallelize(split, mesh, schedule=schedules)
        if folder is not None:
            run(split, FAMILIES["ltx"].inputs(LTX, 0))
            schedules.settle()
            assert {*schedules.chosen.values()} == {"sliced"}
        expected = gradient(whole)
        return float((gradient(split) - expected).norm() / expected.norm())


@pytest.mark.parametrize("schedule", ["serial", "auto"])
def test_gradients_of_positions_are_those_of_one_device(ranks: Ranks, schedule: str, tmp_path: Path) -> None:
    assert max(ranks(2).run(error, tmp_path if schedule == "auto" else None)) < 1e-12


def learned_tables(model: Any) -> None:
    """Of Wan, whose tables come from no input."""
    model.rope.register_forward_hook(lambda _, __, tables: tuple(table.requires_grad_() for table in tables))


def said(schedule: str) -> list[str]:
    """Of LTX's positions and of tables of Wan that train; without gradients both run."""
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        ltx, wan = FAMILIES["ltx"].model(LTX), FAMILIES["wan"].model(Case("wan"))
        for model in (ltx, wan):
            parallelize(model, mesh, schedule=schedule)  # type: ignore[arg-type]
        with pytest.raises(ValueError) as of_positions:
            gradient(ltx)
        learned_tables(wan)
        with pytest.raises(ValueError) as of_tables:
            run(wan, FAMILIES["wan"].inputs(Case("wan"), 0))
        found += [str(of_positions.value), str(of_tables.value)]
        with torch.no_grad():
            run(wan, FAMILIES["wan"].inputs(Case("wan"), 0))
    return found


@pytest.mark.parametrize("schedule", HIDING)
def test_schedules_that_hide_the_exchange_refuse_them(ranks: Ranks, schedule: str) -> None:
    for messages in ranks(2).run(said, schedule):
        assert len(messages) == 2
        assert all("rotary tables require a gradient" in each and "schedule='serial'" in each for each in messages)
