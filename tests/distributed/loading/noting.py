"""A training whose datasets, in worker processes or not, and steps note what they get in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.parallel import SplitPlan


class Log:
    """Lines `what rank value` of all processes."""

    def __init__(self, file: Path) -> None:
        self.rank = dist.get_rank()
        self.lines = file.open("a", buffering=1)

    def note(self, what: str, value: Any) -> None:
        self.lines.write(f"{what} {self.rank} {int(value)}\n")


class Numbers(Dataset[Tensor]):
    def __init__(self, log: Log) -> None:
        self.log = log

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.log.note("worker" if get_worker_info() else "main", index)
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    def __init__(self, log: Log) -> None:
        self.log = log

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        for i in range(worker.id, 6, worker.num_workers):
            self.log.note("stream", i)
            yield torch.tensor([100.0 + i])


class Module(pl.LightningModule):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.log_file = log

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_file.note(f"epoch{self.current_epoch}", batch[0])
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_file.note("validated", batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_workers(file: Path) -> None:
    """Two epochs with two workers that stay, and validation with two that do not."""
    log = Log(file)
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    trainer = pl.Trainer(
        strategy=SequenceParallelDDPStrategy(modules=["net"], plan=plan),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=3,
        num_sanity_val_steps=1,
    )
    trainer.fit(
        Module(log),
        DataLoader(Numbers(log), batch_size=1, num_workers=2, persistent_workers=True, shuffle=True),
        DataLoader(Stream(log), batch_size=1, num_workers=2),
    )
