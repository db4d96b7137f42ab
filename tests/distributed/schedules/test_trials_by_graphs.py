"""Trials of schedules where steps run by CUDA graphs: on CPUs, with what stands for a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.parallel.schedules.records import ScheduleFile
from tests.distributed.pool import ProcessPool
from tests.distributed.schedules.test_schedule_choices import ask, clock_of, prepared

Ranks = Callable[[int], ProcessPool]


class Counts:
    """Stands for what records CUDA graphs: repeats calls by calling, and counts what it recorded."""

    recorded, repeated = 0, 0

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks

    def repeat(self, call: Callable[[], object]) -> Callable[[], object]:
        if self.breaks:
            raise RuntimeError("no pool is left\nsays a stack")
        self.recorded += 1

        def again() -> None:
            self.repeated += 1
            call()

        return again


def by_graphs(folder: Path, breaks: int | None) -> tuple[Any, ...]:
    """Steps run by CUDA graphs; on the rank ``breaks`` none can be recorded."""
    recorder, lines = Counts(breaks == dist.get_rank()), []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        clock = clock_of((0.08, 0.04))
        schedules = prepared(mesh, folder=folder, clock=clock, recorder=lambda _: recorder, log=lines.append)
        ask(schedules)
        schedules.settle()
        dist.barrier()  # rank 0 has written
        kept = ScheduleFile("cpu", folder, by_graphs=True).read()
        return (
            ask(schedules),
            recorder.recorded,
            recorder.repeated,
            lines,
            len(kept),
            ScheduleFile("cpu", folder).read(),
        )


def test_where_steps_run_by_graphs_trials_do(ranks: Ranks, tmp_path: Path) -> None:
    for chosen, recorded, repeated, lines, kept, of_calls in ranks(2).run(by_graphs, tmp_path, None):
        assert (chosen, recorded, kept) == ("sliced", 3, 1)
        assert repeated >= 3 * (1 + 9)
        assert of_calls == {}  # others, of steps without graphs, say nothing of these
        assert not any("without CUDA graphs" in line for line in lines)


def test_a_rank_that_cannot_record_has_all_measure_calls(ranks: Ranks, tmp_path: Path) -> None:
    (first, *_, lines, _, _), (second, _, repeated, *_) = ranks(2).run(by_graphs, tmp_path, 1)
    assert first == second == "sliced" and repeated == 0
    assert "measured without CUDA graphs (rank 1: RuntimeError: no pool is left)" in lines[0]
