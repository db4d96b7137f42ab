"""Training that is asked to end by a signal, anywhere, on any rank; the next run goes on from the checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_videoscale import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.parallel import SplitPlan
from tests.data.ledger import Ledger, note
from tests.data.training import trainer_with

STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
EPOCHS = 3


class Dawdle(Callback):
    """Ranks that are never quite at the same place, in every hook in which a step may spend its time."""

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)

    def _wait(self, *_: Any) -> None:
        time.sleep(self.random.uniform(0, 0.02))

    on_train_batch_start = on_before_backward = on_before_optimizer_step = on_train_batch_end = _wait
    on_validation_batch_start = on_validation_end = on_train_epoch_end = _wait


def newest(folder: Path) -> Path | None:
    """The checkpoint of the last run that was asked to end."""
    found = folder.glob("hpc_ckpt_*.ckpt")
    return max(found, key=lambda path: int(path.stem.removeprefix("hpc_ckpt_")), default=None)


def train(strategy: str, sp: int, run: int, folder: Path, start: str | None = "hpc", **settings: Any) -> None:
    """One run of a chain of runs; see `tests.data.ledger` for what it writes down."""
    checkpoint = newest(folder / "runs")
    state = {} if checkpoint is None else torch.load(checkpoint / "meta.pt", weights_only=False)
    built: Any = STRATEGIES[strategy](
        ulysses_size=sp, modules=["net"], plan=SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    )
    trainer: pl.Trainer = trainer_with(
        strategy=built, devices=2, max_epochs=EPOCHS, accumulate_grad_batches=2, val_check_interval=4,
        default_root_dir=folder / "runs", callbacks=[Dawdle(sp)], **settings,
    )  # fmt: skip
    trainer.callbacks[-1].random.seed(trainer.global_rank)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        note(folder / "runs" / "starts.jsonl", (run, state.get("run"), state.get("global_step", 0)))
    data = VideoDataModule(
        str(folder / "shards/{000..002}.tar"), folder / "index.json", "planned", BucketBudget(m_mem=80, m_comp=6400),
        micro_batches=2, val_shards=str(folder / "shards/000.tar"),
    )  # fmt: skip
    trainer.fit(Ledger(folder / "runs", run), data, ckpt_path=start if checkpoint is not None else None)
    if trainer.is_global_zero:
        note(folder / "runs" / "ends.jsonl", (run, trainer.global_step))
