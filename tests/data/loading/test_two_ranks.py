"""Two real DDP processes: who reads what, equal counts, and one gradient."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import SHAPES, clip, npy, write_shard, write_shards
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 47


def _fit(shards: str, micro_batches: int) -> dict[str, Any]:
    module = Witness()
    data = VideoDataModule(shards, budget=BUDGET, val_shards=shards, micro_batches=micro_batches)
    trainer = trainer_with(
        strategy="ddp",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=micro_batches,
        callbacks=[LossWeighting()],
    )
    trainer.fit(module, data)
    loader = data.train_dataloader()
    return {
        "batches": module.batches,
        "weights": [meta.loss_weight for meta in module.metas],
        "validated": module.validated[-1],
        "gradients": module.gradients,
        "digests": [(loader.sampler.set_epoch(epoch), loader.sampler.plan.digest)[1] for epoch in range(2)],
    }


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_two_ranks_share_an_epoch_and_its_gradient(tmp_path: Path, ranks: Ranks, micro_batches: int) -> None:
    shards = write_shards(tmp_path, SAMPLES)
    first, second = ranks(2).run(_fit, shards, micro_batches)

    assert first["digests"] == second["digests"] and len(set(first["digests"])) == 2
    weights = iter(zip(first["weights"], second["weights"], strict=True))
    for epoch in (0, 1):
        ours, theirs = first["batches"][epoch], second["batches"][epoch]
        assert len(ours) == len(theirs) and len(ours) % micro_batches == 0
        counted = []
        for batches in zip(ours, theirs, strict=True):
            counted.append([ids for ids, weight in zip(batches, next(weights), strict=True) if weight != 0])
        seen = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(counted)))
        assert seen == sorted(f"{i % 2:03}.tar/clip{i:05}" for i in range(SAMPLES))
        if epoch == 0:
            _check_gradients(counted, micro_batches, first["gradients"], second["gradients"])
    assert first["batches"][0] != first["batches"][1]
    assert len(first["validated"]) == len(second["validated"])
    assert len({name for ids in first["validated"] + second["validated"] for name in ids}) == SAMPLES


def _check_gradients(counted: list[list[list[str]]], micro_batches: int, *gradients: list[float]) -> None:
    for step, start in enumerate(range(0, len(counted), micro_batches)):
        ids = [name for slot in counted[start : start + micro_batches] for batch in slot for name in batch]
        x = np.array([int(name[-5:]) / 100 for name in ids])
        expected = np.mean(2 * x * (0.5 * x - 1))
        for of_rank in gradients:
            assert of_rank[step] == pytest.approx(expected, rel=1e-12)


def _fit_broken(shards: str, strategy: str) -> dict[str, Any]:
    module, data = Witness(), VideoDataModule(shards, budget=BUDGET, micro_batches=2)
    kinds: dict[str, Any] = {"ddp": "ddp", "ours": SequenceParallelDDPStrategy(ulysses_size=1)}
    trainer = trainer_with(strategy=kinds[strategy], devices=2, accumulate_grad_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    sampler = data.train_dataloader().sampler
    sampler.set_epoch(0)
    planned = list(sampler)
    warned = sum("left out, with weight 0" in str(warning.message) for warning in caught)
    counted = [list(m.samples) if m.meta.loss_weight else [] for m in planned]
    return {"planned": counted, "gradients": module.gradients, "warned": warned}


@pytest.mark.parametrize("strategy", ["ddp", "ours"])
def test_samples_that_cannot_be_read_cost_their_weight_and_no_step(tmp_path: Path, ranks: Ranks, strategy: str) -> None:
    broken = {0, 3, *range(20, 40)}
    clips = [clip(i, mask_npy=b"" if i in broken else npy(np.ones(2))) for i in range(SAMPLES)]
    results = ranks(2).run(_fit_broken, str(write_shard(tmp_path / "000.tar", clips)), strategy)
    assert sum(result["warned"] for result in results) >= len(broken)
    slots = [result["planned"] for result in results]
    steps = [
        [row for of_rank in slots for rows in of_rank[i : i + 2] for row in rows] for i in range(0, len(slots[0]), 2)
    ]
    assert sorted(row for rows in steps for row in rows) == list(range(SAMPLES))
    expected = [sum(_slope(row / 100) for row in rows if row not in broken) / len(rows) for rows in steps]
    for result in results:
        assert result["gradients"] == pytest.approx(expected, rel=1e-10)


def _slope(x: float) -> float:
    return 2 * x * (0.5 * x - 1)


class LogsOverRanks(Witness):
    """Logs the loss of a validation over all ranks, and remembers this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.validated_at: list[int] = []

    def on_validation_start(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.validated_at.append(self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append((len(batch["sample_ids"]), loss.item()))
        self.log("val_loss", loss, sync_dist=True)


def _unsplit() -> SequenceParallelDDPStrategy:
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    return SequenceParallelDDPStrategy(ulysses_size=1, modules=[""], plan=plan)


def _validate(shards: str, budget: BucketBudget = BUDGET) -> tuple[float, list[tuple[int, float]]]:
    module, trainer = LogsOverRanks(), trainer_with(strategy=_unsplit(), devices=2)
    data = VideoDataModule(shards, budget=budget, val_shards=shards)
    return trainer.validate(module, data, verbose=False)[0]["val_loss"], module.seen


def test_a_logged_mean_is_that_of_all_samples_where_ranks_hold_unequally_many(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(2).run(_validate, write_shards(tmp_path, 7))
    counts, losses = zip(*itertools.chain.from_iterable(seen for _, seen in results), strict=True)
    assert sum(counts) == 7
    for logged, _ in results:
        assert logged == pytest.approx(np.average(losses, weights=counts), rel=1e-6)


def test_a_logged_mean_takes_a_sample_once_that_is_read_again_to_fill_a_gap(tmp_path: Path, ranks: Ranks) -> None:
    of_one_length = [clip(40 * number, SHAPES[-1]) for number in range(5)]
    shards, one_each = str(write_shard(tmp_path / "000.tar", of_one_length)), BucketBudget(m_mem=80, m_comp=80 * 80)
    results = ranks(2).run(_validate, shards, one_each)
    losses = {loss for _, seen in results for _, loss in seen}
    assert len(losses) == 5 and sum(len(seen) for _, seen in results) == 6
    for logged, _ in results:
        assert logged == pytest.approx(np.mean(list(losses)), rel=1e-6)


def _fit_by_own_clocks(shards: str, intervals: list[timedelta]) -> int:
    module, data = LogsOverRanks(), VideoDataModule(shards, budget=BUDGET, val_shards=shards)
    interval = intervals[int(os.environ["RANK"])]
    trainer = trainer_with(strategy=_unsplit(), devices=2, val_check_interval=interval, num_sanity_val_steps=0)
    trainer.fit(module, data)
    return len(module.validated_at)


def test_ranks_validate_together_after_a_time_by_the_clock_of_the_first(tmp_path: Path, ranks: Ranks) -> None:
    shards, soon, late = write_shards(tmp_path, SAMPLES), timedelta(microseconds=1), timedelta(hours=4)
    first, second = ranks(2).run(_fit_by_own_clocks, shards, [soon, late])
    assert first == second > 1
    assert ranks(2).run(_fit_by_own_clocks, shards, [late, soon]) == [0, 0]


def _fit_own_shards(folder: str) -> str:
    shards = os.path.join(folder, f"rank{os.environ['RANK']}", "000.tar")
    data = VideoDataModule(shards, budget=BUDGET, index=os.path.join(folder, f"{os.environ['RANK']}.json"))
    try:
        trainer_with(strategy="ddp", devices=2, callbacks=[LossWeighting()]).fit(Witness(), data)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_see_different_shards_all_stop(tmp_path: Path, ranks: Ranks) -> None:
    for rank in (0, 1):
        write_shard(tmp_path / f"rank{rank}" / "000.tar", [clip(i) for i in range(4 + rank)])
    messages = ranks(2).run(_fit_own_shards, str(tmp_path))
    assert all(message.startswith("The ranks do not see the same shards") for message in messages)
    assert "equals rank 0's plan" in messages[0] and "differs from rank 0's plan" in messages[1]
