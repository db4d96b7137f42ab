"""A regression small enough to check by hand, in batches that carry a `meta`, and a logger that remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Meta(NamedTuple):
    """What the callbacks read of `VideoDataModule`'s meta."""

    samples: int
    sequence_length: int
    loss_weight: float = 1.0


class Slope(pl.LightningModule):
    """loss = mean(slope * x), so that the gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.gradients: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = (self.slope * batch["x"]).mean()
        self.log("loss", loss, batch_size=len(batch["x"]))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.slope.grad is not None
        self.gradients.append(self.slope.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches_of(metas: Sequence[Meta | None]) -> DataLoader[dict[str, Any]]:
    """One batch per meta; sample i of batch k is k + 1 (a batch without a meta has two samples)."""
    batches = [
        {"x": torch.full((meta.samples if meta else 2,), k + 1.0, dtype=torch.float64)}
        | ({"meta": meta} if meta else {})
        for k, meta in enumerate(metas)
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class MemoryLogger(Logger):
    """Keeps what is logged; fails instead if told so."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.failing = failing
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.failing and "balance/cv_step" in metrics:
            raise OSError("disk full")
        self.rows.append((step, metrics))

    def balance(self) -> list[tuple[int | None, dict[str, float]]]:
        """The rows that the monitor logged."""
        return [(step, row) for step, row in self.rows if "balance/cv_step" in row]


def trainer_with(
    *callbacks: pl.Callback, logger: Logger | Sequence[Logger] | bool = False, **kwargs: Any
) -> pl.Trainer:
    """A quiet Trainer on one CPU."""
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**(settings | quiet | {"callbacks": list(callbacks), "logger": logger} | kwargs))
