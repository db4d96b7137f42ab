"""Training in which one rank fails: `python -m tests.strategies.failures.failing_training folder --fault kill`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SequenceContext, Split, SplitPlan, sequence_parallel_attention
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)

STRATEGIES = {
    "ddp": SequenceParallelDDPStrategy,
    "fsdp2": SequenceParallelFSDP2Strategy,
    "deepspeed": SequenceParallelDeepSpeedStrategy,
}
STEPS = 6
FAILING_STEP = 3


class Block(nn.Module):
    """Attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        if self.context is None:
            attended = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)
        else:
            context = self.context
            lengths = context.lengths()
            attended = sequence_parallel_attention(q, k, v, context.mesh, lengths=lengths, transport=context.transport)
        return x + self.out(attended.flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def join_attention(model: nn.Module, context: SequenceContext) -> Callable[[], None]:
    def give(value: SequenceContext | None) -> None:
        for block in model.get_submodule("blocks").children():
            block.context = value

    give(context)
    return lambda: give(None)


def split_plan() -> SplitPlan:
    return SplitPlan({"blocks.0": {"x": Split(1)}}, {}, {"blocks.1": {0: Split(1)}}, join_attention)


class Module(pl.LightningModule):
    def __init__(self, fault: str = "none", failing_rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.fault, self.failing_rank = fault, failing_rank
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fault != "none" and self.global_step == FAILING_STEP and self.global_rank == self.failing_rank:
            self.fail()
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def fail(self) -> None:
        sys.stdout.write(f"\nfails at {time.time()}\n")
        sys.stdout.flush()
        if self.fault == "raise":
            raise ValueError("the actual cause")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "memory":
            torch.empty(2**55, dtype=torch.uint8, device=self.device)  # which no machine has

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(
    strategy: str,
    folder: Path | None,
    module: Module,
    *,
    timeout: float = 60,
    transport: Any = "collective",
    accelerator: str = "cpu",
    start: Path | None = None,
    graphs: bool = False,
) -> list[float]:
    """Trains on two devices, saves every step in ``folder``, returns the losses."""
    batch = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    context: AbstractContextManager[None] = nullcontext()
    if strategy == "deepspeed" and accelerator == "cpu":
        from tests.distributed.zero import deepspeed_on_cpu  # whose imports take seconds of every process

        context = deepspeed_on_cpu()
    with context:
        built = STRATEGIES[strategy](
            modules=["net"],
            plan=split_plan(),
            timeout=timedelta(seconds=timeout),
            transport=transport,
            **({"graphs": True} if graphs else {}),
        )
        pl.Trainer(
            strategy=built,
            accelerator=accelerator,
            devices=2,
            max_steps=STEPS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=folder is not None,
            callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=True)]
            if folder is not None
            else [],
        ).fit(
            module,
            DataLoader(batch.expand(STEPS, 9, 8), batch_size=1),  # always the same: this loader starts anew
            ckpt_path=start,
        )
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--fault", choices=["none", "raise", "kill", "hang", "memory"], default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--transport", default="collective")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--graphs", action="store_true", help="the failing step is replayed")
    given = parser.parse_args()
    train(
        given.strategy,
        given.folder,
        Module(given.fault, given.rank),
        timeout=given.timeout,
        transport=given.transport,
        accelerator=given.accelerator,
        graphs=given.graphs,
    )
