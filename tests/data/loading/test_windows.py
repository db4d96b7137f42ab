"""Epochs in windows under a real Trainer: every sample once, whatever reads ahead and whoever stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.planning.shapes import ShapePolicy
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import SHAPES, clip, write_shard, write_shards
from tests.data.loading.test_replanning import LARGE, SMALL, Adopting, tokens
from tests.data.loading.test_resuming import SaveAfter, fit, ids
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 90

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES, shards=6)


def data(shards: str, budget: BucketBudget = BUDGET, **settings: Any) -> VideoDataModule:
    return VideoDataModule(shards, budget=budget, shard_window=1, **{"window": 25, **settings})


def names() -> list[str]:
    return sorted(f"{i % 6:03}.tar/clip{i:05}" for i in range(SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_sample_once_per_epoch(shards: str, num_workers: int) -> None:
    module = fit(data(shards, num_workers=num_workers), 2, max_epochs=3)
    assert [ids(batches) for batches in module.batches.values()] == [names()] * 3
    assert module.trainer.global_step == sum(map(len, module.batches.values())) / 2
    assert module.batches[0] != module.batches[1]
    alike = fit(data(shards), 2, max_epochs=1)
    assert alike.batches[0] == module.batches[0], "workers decide nothing"
    first = [int(name[:3]) for batch in alike.batches[0][:8] for name in batch]
    assert len(set(first)) < 6, "the first window reads few shards"


def test_one_window_of_everything_is_the_epoch_as_it_is_without(shards: str) -> None:
    plain, in_one = (fit(data(shards, window=window), 2, max_epochs=2) for window in (None, 1000))
    assert in_one.batches == plain.batches and in_one.metas == plain.metas


@pytest.mark.parametrize("stop", [1, 7, 8, 9, 17])
def test_a_run_goes_on_from_any_micro_batch(shards: str, tmp_path: Path, stop: int) -> None:
    file = tmp_path / "run.ckpt"
    whole = fit(data(shards, num_workers=1), 2, None, SaveAfter(stop, file), max_epochs=2)
    resumed = fit(data(shards), 2, file, max_epochs=2)
    done = stop // 2 * 2
    assert resumed.batches[0] == whole.batches[0][done:] and resumed.batches[1] == whole.batches[1]
    other = fit(data(shards, window=40, balance="dual_constraint"), 1, file, max_epochs=1)
    assert ids([*whole.batches[0][:done], *other.batches[0]]) == names()
    without = fit(data(shards, window=None), 2, file, max_epochs=1)
    assert ids([*whole.batches[0][:done], *without.batches[0]]) == names()


def test_the_trainer_validates_at_the_end_of_the_epoch(shards: str, tmp_path: Path) -> None:
    val = write_shards(tmp_path / "val", 4)
    module = fit(data(shards, val_shards=val), 2, None, max_epochs=2, num_sanity_val_steps=0)
    assert len(module.validated) == 2 and ids(module.batches[0]) == names()
    limited = fit(data(shards), 2, None, max_epochs=1, limit_train_batches=12)
    assert len(limited.batches[0]) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_planned_ahead_under_other_budgets_is_planned_anew(shards: str, num_workers: int) -> None:
    windows = fit(data(shards, SMALL, num_workers=num_workers), 2, None, max_epochs=1)
    for step in (0, 2, 5, 6):
        module = fit(data(shards, SMALL, num_workers=num_workers), 2, None, Adopting({step: LARGE}), max_epochs=1)
        assert ids(module.batches[0]) == names()
        read_ahead = 2 * 2 * num_workers
        later = [tokens(meta) for meta in module.metas[2 * step + read_ahead :]]
        assert max(later) > 80 and len(module.metas) < len(windows.metas)


def test_what_a_loader_reads_without_a_trainer(shards: str) -> None:
    module = data(shards)
    module.prepare_data()
    module.setup("fit")
    loader = module.train_dataloader()
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        assert ids([batch["sample_ids"] for batch in loader]) == names()
    assert ids([batch["sample_ids"] for batch in loader]) == names(), "again without set_epoch"
    assert module.passes() == {"shards": 1.0}


def test_every_shape_of_the_sample_can_be_measured(shards: str) -> None:
    module = data(shards, window=30)
    module.prepare_data()
    module.setup("fit")
    table, batches = module.training_shapes()
    assert 25 <= len(table) <= 31 and sum(module.clip_lengths().values()) == len(table)
    for shape, length in zip(table.shapes, table.sequence_lengths.tolist(), strict=True):
        assert batches(Cell(shape, length, 2))["latents"].shape[2:] == shape[:3]


def test_budgets_are_found_and_ranks_laid_out_for_the_longest_clip_of_all(tmp_path: Path) -> None:
    rare = [clip(i, SHAPES[0]) for i in range(60)]
    rare[0] = clip(0, SHAPES[3])
    for number in range(6):
        write_shard(tmp_path / f"{number:03}.tar", rare[number::6])
    settings: dict[str, Any] = {"shards": str(tmp_path / "*.tar"), "budget": "auto", "seed": 1}
    found = {window: VideoDataModule(**settings, window=window) for window in (None, 10)}
    for module in found.values():
        module.prepare_data()
        module.setup("fit")
        assert max(module.clip_lengths()) == 80
        module.train_dataloader()
    whole, in_windows = (module.planner for module in found.values())
    assert whole is not None and in_windows is not None and in_windows.windows is not None
    first = in_windows.windows.content(0, in_windows.windows.first()).table
    assert max(first.sequence_lengths) == 4, "it is not in the first window"
    assert (in_windows.budget.m_mem, in_windows.budget.cost(1, 80)) == (whole.budget.m_mem, whole.budget.cost(1, 80))


class Hesitant(ShapePolicy):
    """A user's own, which fails where it is not called by the main thread."""

    def shape(self, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("no shape here")
        return super().shape(*args)


def test_what_goes_wrong_in_the_background_ends_the_training_with_its_cause(shards: str) -> None:
    module = Witness()
    with pytest.raises(RuntimeError, match="no shape here") as caught:
        trainer_with(accumulate_grad_batches=2).fit(module, data(shards, shape_policy=Hesitant()))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert len(module.batches[0]) > 4, "the first window is trained"


def _fit(shards: str, val: str, sp: int) -> dict[str, Any]:
    """One of two ranks, which trains three epochs; between two windows of the second other budgets are adopted."""
    strategy: Any = "ddp"
    if sp == 2:
        plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
        strategy = SequenceParallelDDPStrategy(ulysses_size=2, modules=["net"], plan=plan)
    module = Paired()
    trainer = trainer_with(
        strategy=strategy, devices=2, max_epochs=3, accumulate_grad_batches=2, num_sanity_val_steps=0,
        val_check_interval=0.5, callbacks=[LossWeighting(), Adopting({12: LARGE})],
    )  # fmt: skip
    trainer.fit(module, data(shards, SMALL, val_shards=val))
    counted = [meta.loss_weight > 0 for meta in module.metas]
    return {"batches": module.batches, "counted": counted, "validated": len(module.validated)}


class Paired(Witness):
    """With a network that a sequence-parallel strategy can be told of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()


@pytest.mark.parametrize("sp", [1, 2])
def test_ranks_come_to_windows_together(tmp_path: Path, ranks: Ranks, sp: int) -> None:
    shards, val = write_shards(tmp_path / "train", SAMPLES, shards=6), write_shards(tmp_path / "val", 4)
    first, second = ranks(2).run(_fit, shards, val, sp)
    assert first["validated"] == second["validated"] > 3
    assert {epoch: len(batches) for epoch, batches in first["batches"].items()} == {
        epoch: len(batches) for epoch, batches in second["batches"].items()
    }
    if sp == 2:
        assert first == second
    counted = iter(zip(first["counted"], second["counted"], strict=True))
    for epoch, batches in first["batches"].items():
        pairs = list(zip(batches, second["batches"][epoch], strict=True))
        weights = [next(counted) for _ in pairs]
        seen = [b for pair, which in zip(pairs, weights, strict=True) for b, counts in zip(pair, which, strict=True)
                if counts]  # fmt: skip
        assert ids(seen[::sp]) == names()
