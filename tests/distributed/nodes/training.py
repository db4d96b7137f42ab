"""A tiny Wan that is trained on two nodes of two ranks; every rank writes down its place and its losses."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.wan_training import Clips, Record, RectifiedFlow
from tests.scripts import torchrun
from tests.strategies.fsdp2.training import trainer

STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}


class NotePlace(Callback):
    """Writes ``place<i>.json`` when training starts; before a step, waits for a file if told to.

    Args:
        folder: Of both.
        pause: The step before which a rank touches ``paused<i>`` and waits for ``go``; None: it never does.
    """

    def __init__(self, folder: Path, pause: int | None) -> None:
        self.folder, self.pause = folder, pause

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        mesh = trainer.strategy.mesh  # type: ignore[attr-defined]
        axes = {name: list(getattr(mesh, name).ranks) for name in ("dp", "ring", "ulysses")}
        place = {"host": socket.gethostname(), "node": trainer.node_rank, "local": trainer.local_rank}
        (self.folder / f"place{trainer.global_rank}.json").write_text(json.dumps(axes | place))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.pause:
            (self.folder / f"paused{trainer.global_rank}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.05)


def train(
    folder: Path,
    strategy: str,
    settings: Mapping[str, Any],
    nodes: int = 2,
    start: Path | None = None,
    pause: int | None = None,
    timeout: float = 60,
) -> None:
    """Trains four steps on one clip, saves each, and writes ``losses<i>.json``."""
    record = Record()
    checkpoints = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    built: Any = STRATEGIES[strategy](timeout=timedelta(seconds=timeout), **settings)
    run = trainer(
        built, num_nodes=nodes, devices=2, max_steps=4, callbacks=[record, NotePlace(folder, pause), checkpoints],
        enable_checkpointing=True, default_root_dir=folder,
    )  # fmt: skip
    clip = Subset(Clips((2, 4, 4), torch.float32), [0] * 16)
    run.fit(RectifiedFlow(num_attention_heads=4), DataLoader(clip), ckpt_path=start)
    (folder / f"losses{run.global_rank}.json").write_text(json.dumps(record.losses))


def launch(command: str, *args: Any) -> None:
    """What this command does, its ranks forked from a process that has all modules imported."""
    torchrun(shlex.split(command)[1:-1], train, *args)
