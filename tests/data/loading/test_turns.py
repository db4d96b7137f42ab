"""Ranks that read one sampler's micro-batches in turn: every sample once, however far apart they read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.progress import Progress
from lightning_videoscale.data.planning import BucketPlanner, MicroBatch
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import write_shards
from tests.data.loading.test_replanning import LARGE, SAMPLES, SMALL, Adopting
from tests.data.loading.test_resuming import everything, ids
from tests.data.loading.test_windows import Paired
from tests.data.planning.tables import table_of
from tests.data.planning.test_windows import CLIPS
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool

PLANNER = BucketPlanner(table_of([i % 5 for i in range(200)]), BucketBudget(200, 200**2), micro_batches=2)
OTHER = replace(PLANNER, budget=BucketBudget(600, 600**2))


def prefetched(batches: Iterator[MicroBatch], ahead: int) -> Iterator[MicroBatch]:
    """As workers read: so many more than are asked for, from the first on."""
    read = deque(islice(batches, ahead))
    for batch in batches:
        read.append(batch)
        yield read.popleft()
    yield from read


class Group:
    """Ranks that train on the same micro-batches, each read one before it is trained on."""

    def __init__(self, planner: BucketPlanner, ranks: int, ahead: int = 0) -> None:
        self.samplers = [PlannedSampler(planner, 0, on_begin=lambda progress: None) for _ in range(ranks)]
        for sampler in self.samplers:
            sampler.sharing = ranks
        self.turns = [
            prefetched(islice(sampler, turn, None, ranks), ahead) for turn, sampler in enumerate(self.samplers)
        ]

    def train(self, after_each: Callable[[int], None]) -> list[MicroBatch]:
        """Trains an epoch, and returns its micro-batches in their order."""
        trained: list[MicroBatch] = []
        coming = next(self.turns[0], None)
        for position in count(1):
            if coming is None:
                return trained
            batch, coming = coming, next(self.turns[position % len(self.turns)], None)
            trained.append(batch)
            after_each(position)
        raise AssertionError

    def reach(self, position: int) -> None:
        assert len({sampler.reach(position).plan.digest for sampler in self.samplers}) == 1

    def replan(self, planner: BucketPlanner) -> None:
        taken = max(sampler.taken for sampler in self.samplers)
        for sampler in self.samplers:
            sampler.replan(planner, taken)


def samples(trained: list[MicroBatch]) -> list[int]:
    return sorted(sample for batch in trained if batch.meta.loss_weight for sample in batch.samples)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("steps", [(0,), (1,), (2,), (3,), (1, 2), (2, 9)])
def test_a_rank_whose_first_turn_comes_after_a_new_plan_reads_what_the_others_expect(
    steps: tuple[int, ...], ahead: int
) -> None:
    group, planners = Group(PLANNER, 4, ahead), dict(zip(steps, (OTHER, PLANNER), strict=False))

    def adopt(position: int) -> None:
        if position in planners:
            group.replan(planners[position])

    adopt(0)
    trained = group.train(adopt)
    assert samples(trained) == list(range(200)) and len(trained) == len(group.samplers[0])
    assert len({sampler.plan.digest for sampler in group.samplers}) == 1


@pytest.mark.parametrize(("size", "k", "ahead"), [(6, 1, 0), (6, 2, 2), (10, 1, 2), (20, 2, 0), (60, 1, 0)])
def test_windows_that_are_over_before_all_of_a_group_have_read(size: int, k: int, ahead: int) -> None:
    planner = CLIPS.planner(size, micro_batches=k)
    group = Group(planner, 8, ahead)
    trained = group.train(group.reach)
    assert trained == [*PlannedSampler(planner, 0)]
    other, plain = Group(planner, 8, ahead), samples(trained)

    def adopt(position: int) -> None:
        other.reach(position)
        if position in (1, 5, 6, 19):
            other.replan(replace(planner, budget=BucketBudget(160 + 40 * position, (160.0 + 40 * position) ** 2)))

    replanned = other.train(adopt)
    assert samples(replanned) == plain


def test_windows_are_forgotten_by_who_has_read_them_and_by_who_never_reads() -> None:
    planner = CLIPS.planner(10)
    group, apart = Group(planner, 2), PlannedSampler(planner, 0, on_begin=lambda progress: None)
    places: dict[int, ReferenceType[Progress]] = {}

    def reach(position: int) -> None:
        group.reach(position)
        for sampler in (*group.samplers, apart):
            place = sampler.reach(position)
            places[id(place)] = ref(place)
        assert sum(place() is not None for place in places.values()) <= 3 * 4

    group.train(reach)
    assert len(places) > 3 * 10
    with pytest.raises(RuntimeError, match="would be lost"):
        next(iter(apart))


def _fit(shards: str, step: int) -> list[list[str]]:
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    strategy = SequenceParallelDDPStrategy(ulysses_size=4, modules=["net"], plan=plan)
    module, adopting = Paired(), Adopting({step: LARGE})
    trainer: Any = trainer_with(strategy=strategy, devices=4, max_epochs=1, callbacks=[adopting])
    trainer.fit(module, VideoDataModule(shards, budget=SMALL))
    return module.batches[0]


def test_a_group_that_plans_anew_before_all_of_it_have_read(
    tmp_path: Path, ranks: Callable[[int], ProcessPool]
) -> None:
    shards = write_shards(tmp_path, SAMPLES, shards=3)
    for step in (1, 2):
        trained = ranks(4).run(_fit, shards, step)
        assert trained == [trained[0]] * 4 and ids(trained[0]) == everything(SAMPLES)
