"""Hooks that ask the DataModule for a loader, as for its length, while the Trainer reads another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_videoscale.data import VideoDataModule
from tests.data.clips import write_shards
from tests.data.loading.test_replanning import LARGE, SAMPLES, SMALL, Adopting, data
from tests.data.loading.test_resuming import SaveAfter, everything, fit, ids

HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES, shards=3)


class Looking(Callback):
    """Asks for a loader in one hook."""

    def __init__(self, hook: str) -> None:
        self.lengths: set[int] = set()
        setattr(self, hook, self.look)

    def look(self, trainer: Any, *_: Any) -> None:
        self.lengths.add(len(trainer.datamodule.train_dataloader()))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_goes_on_as_if_nobody_had_looked(shards: str, tmp_path: Path, hook: str) -> None:
    plain = fit(VideoDataModule(shards, budget=SMALL))
    looking = Looking(hook)
    module = fit(VideoDataModule(shards, budget=SMALL), 1, None, looking, SaveAfter(8, tmp_path / "eight.ckpt"))
    assert module.batches == plain.batches and looking.lengths <= {len(each) for each in plain.batches.values()}
    resumed = fit(VideoDataModule(shards, budget=SMALL), 1, tmp_path / "eight.ckpt", Looking(hook))
    assert resumed.batches == {0: plain.batches[0][8:], 1: plain.batches[1]}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", [{}, {"window": 30}])
def test_what_is_adopted_reaches_the_loader_that_is_read(shards: str, hook: str, settings: dict[str, Any]) -> None:
    for step in (0, 3):
        module = fit(data(shards, **settings), 2, None, Looking(hook), Adopting({step: LARGE}))
        assert all(ids(batches) == everything(SAMPLES) for batches in module.batches.values())
        sizes = [meta.samples * meta.sequence_length for meta in module.metas]
        assert max([0, *sizes[: 2 * step]]) <= 80 < max(sizes[2 * step : len(module.batches[0])])


def test_an_epoch_that_begins_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (write_shards(tmp_path / name, 20) for name in ("one", "other"))
    with caplog.at_level("INFO"):
        fit(VideoDataModule({one: 1.0, other: 1.0}, budget=SMALL), 1, None, Looking("on_train_epoch_start"))
    assert [line.split(" begins")[0] for line in caplog.messages if " begins;" in line] == ["Epoch 0", "Epoch 1"]
