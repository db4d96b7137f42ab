"""A loader that was made without a Trainer, in its hands and in loops of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.loader import PlannedLoader
from tests.data.clips import write_shards
from tests.data.training import Witness, trainer_with
from tests.distributed.pool import ProcessPool

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 24

Ranks = Callable[[int], ProcessPool]


def _loader(shards: str, micro_batches: int = 1) -> PlannedLoader:
    data = VideoDataModule(shards, budget=BUDGET, micro_batches=micro_batches)
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


def _fit(shards: str) -> str:
    try:
        trainer_with(strategy="ddp", devices=2).fit(Witness(), _loader(shards))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_would_all_train_on_everything_are_an_error(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2).run(_fit, write_shards(tmp_path, SAMPLES)):
        assert "1 data-parallel rank, and there are 2" in message and "datamodule=data" in message


def _read_together(shards: str) -> tuple[int, int]:
    """What a rank reads where both share each batch: every second batch in turn, and all of them."""
    loader = _loader(shards)
    turns = list(loader.taking_turns(dist.get_rank(), 2))
    loader.sampler.sharing = 2
    return sum(batch["meta"].samples for batch in turns), sum(batch["meta"].samples for batch in loader)


def test_ranks_that_share_each_batch_read_it(tmp_path: Path, ranks: Ranks) -> None:
    (first, every), (second, too) = ranks(2).run(_read_together, write_shards(tmp_path, SAMPLES))
    assert first + second == every == too == SAMPLES


def test_weights_that_may_not_count_are_told_of_once(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, SAMPLES)
    loader = _loader(shards, micro_batches=2)
    weights = [micro_batch.meta.loss_weight for micro_batch in loader.sampler.plan.micro_batches_of(0)]
    told = f"{min(weights):.3g} to {max(weights):.3g}.*datamodule=data.*meta.*loss_weight"
    with pytest.warns(UserWarning, match=told) as caught:
        trainer_with(max_epochs=2, accumulate_grad_batches=2).fit(Witness(), loader)
    assert len([each for each in caught if "loss_weight" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*loss_weight")
        assert len(list(_loader(shards))) > 1, "each batch is a step, and weighs 1"
        data = VideoDataModule(shards, budget=BUDGET)
        trainer_with(accumulate_grad_batches=2).fit(Witness(), data)
