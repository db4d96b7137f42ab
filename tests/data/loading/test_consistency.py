"""A run goes on with the samples, and the order of them, that its epoch was begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.consistency import check_same_draws, check_same_index
from tests.data.clips import write_shards
from tests.data.loading.test_resuming import SaveAfter
from tests.data.training import Witness, trainer_with

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)


def test_shards_in_another_order_are_other_shards() -> None:
    check_same_index({"a.tar": "1", "b.tar": "2"}, {"a.tar": "1", "b.tar": "2"})
    with pytest.raises(ValueError, match="in another order"):
        check_same_index({"a.tar": "1", "b.tar": "2"}, {"b.tar": "2", "a.tar": "1"})


def test_what_an_earlier_release_did_not_keep_is_not_compared() -> None:
    check_same_draws({}, {"seed": 1, "shard_window": 64, "weights": None})


@pytest.mark.parametrize(
    ("changed", "named"), [({"seed": 1}, "seed=0, now 1"), ({"shard_window": 1}, "shard_window=64, now 1")]
)
def test_an_epoch_goes_on_in_its_order(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    shards, file = write_shards(tmp_path / "train", 40, shards=4), tmp_path / "begun.ckpt"
    trainer_with(callbacks=[SaveAfter(2, file)], max_epochs=1).fit(Witness(), VideoDataModule(shards, budget=BUDGET))
    with pytest.raises(ValueError, match=named):
        trainer_with(max_epochs=1).fit(Witness(), VideoDataModule(shards, budget=BUDGET, **changed), ckpt_path=file)


def test_a_run_that_was_given_numbers_of_numpy_goes_on(tmp_path: Path) -> None:
    """As weights by the sizes of datasets are; torch loads no checkpoint by default that holds them."""
    shards, file = write_shards(tmp_path / "train", 40), tmp_path / "begun.ckpt"
    numbers: dict[str, Any] = {"seed": np.int64(3), "shard_window": np.int64(8), "window": np.int64(16)}

    def data() -> VideoDataModule:
        return VideoDataModule({shards: np.sqrt(np.float64(40))}, budget=BUDGET, **numbers)

    trainer_with(callbacks=[SaveAfter(2, file)], max_epochs=1).fit(Witness(), data())
    trainer = trainer_with(max_steps=4, max_epochs=1)
    trainer.fit(Witness(), data(), ckpt_path=file)
    assert trainer.global_step == 4
