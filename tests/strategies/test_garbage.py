"""When a strategy lets Python collect all garbage."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_videoscale.garbage import ShortCollections
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.wan_training import RectifiedFlow
from tests.strategies.fsdp2.training import clips, trainer

pytestmark = pytest.mark.usefixtures("collector")


class Places(pl.Callback):
    """After how many steps garbage was collected, and in which stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collected: list[tuple[str, int]] = []
        self.is_short: list[bool] = []
        self.trainer: Any = None
        renew = ShortCollections.renew

        def noted(collections: ShortCollections) -> None:
            self.collected.append((self.trainer.state.stage.value, self.trainer.global_step))
            renew(collections)

        monkeypatch.setattr(ShortCollections, "renew", noted)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, *_: Any) -> None:
        self.is_short.append(gc.get_freeze_count() > 0)


def test_garbage_is_collected_at_places_that_all_ranks_have_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch)
    for _ in range(2):  # a second run begins anew
        places.collected, places.is_short = [], []
        trainer(SequenceParallelDDPStrategy(ulysses_size=1), max_steps=9, val_check_interval=6, callbacks=[places]).fit(
            RectifiedFlow(), clips(), clips()
        )
        # Steps are counted once they are over.
        assert places.collected == [("train", 3), ("validate", 6), ("train", 7)]
        assert places.is_short == [step >= 3 for step in range(9)]
        assert gc.get_freeze_count() == 0
