"""How long a checkpoint keeps training waiting: written at once, and while training goes on.

    python benchmarks/strategies/background_checkpoints.py

Two ranks over gloo on this machine train a few wide layers with AdamW, and save to a disk after every step. Measured
are the seconds until `save_checkpoint` returns, and until the checkpoint is whole. The next step comes only then, so no
save waits for another, and training takes nothing from the thread that writes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, task_of_worker
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy

STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
SETTINGS = {"ranks": 2, "layers": 6, "width": 2048, "optimizer": "AdamW", "dtype": "float32", "saves": 6, "warmup": 1}
LONGEST = 120.0  # s until a checkpoint is whole


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(SETTINGS["width"], SETTINGS["width"]) for _ in range(SETTINGS["layers"])])

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Saves(Callback):
    """Saves when the checkpoint before is whole, and notes the seconds of each save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocked: list[float] = []
        self.whole: list[float] = []
        self.size = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        path = self.folder / f"{len(self.blocked)}.ckpt"
        start = time.perf_counter()
        trainer.save_checkpoint(path)
        self.blocked.append(time.perf_counter() - start)
        while not path.exists() and time.perf_counter() - start < LONGEST:
            time.sleep(0.005)
        self.whole.append(time.perf_counter() - start)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self.size = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)
        trainer.strategy.barrier()


def train(strategy: str, background: bool, folder: str) -> dict[str, Any]:
    saves = Saves(Path(folder))
    pl.Trainer(
        strategy=STRATEGIES[strategy](
            modules=["net"], plan=SplitPlan({}, {}, {}, lambda model, context: lambda: None), ulysses_size=1,
            timeout=timedelta(minutes=5),
        ),
        plugins=[AsyncCheckpointIO()] if background else [],
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_steps=SETTINGS["warmup"] + SETTINGS["saves"],
        callbacks=[saves], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Wide(), DataLoader(torch.randn(64, SETTINGS["width"]), batch_size=2))  # fmt: skip
    first = SETTINGS["warmup"]
    return {"blocked": saves.blocked[first:], "whole": saves.whole[first:], "bytes": saves.size}


def row(strategy: str, background: bool, measured: dict[str, Any]) -> dict[str, Any]:
    blocked = np.array(measured["blocked"])
    return {
        "strategy": strategy,
        "variant": "in the background" if background else "at once",
        "checkpoint_bytes": measured["bytes"],
        "median_blocked_s": round(float(np.median(blocked)), 4),
        "p10_blocked_s": round(float(np.quantile(blocked, 0.1)), 4),
        "p90_blocked_s": round(float(np.quantile(blocked, 0.9)), 4),
        "median_whole_s": round(float(np.median(measured["whole"])), 4),
    }


def main() -> None:
    commit = provenance.commit()
    rows = []
    for strategy in STRATEGIES:
        for background in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                measured = launch(
                    __file__, ranks=SETTINGS["ranks"], strategy=strategy, background=background, folder=folder
                )
            rows.append(row(strategy, background, measured))
            print(rows[-1], flush=True)
    path = provenance.path("strategies", "background_checkpoints")
    settings = SETTINGS | {"cores": os.cpu_count()}
    provenance.write(path, "strategies/background_checkpoints", commit, settings, rows)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        finish(train(**task))
    else:
        main()
