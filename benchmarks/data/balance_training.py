"""Trainings on shards of the standard mix, and what each of their micro-batches was and took."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.data.balance_figures import Columns, Waits, columns_of, of_groups
from benchmarks.launch import say
from benchmarks.wan_training import RectifiedFlow, trainer_with
from lightning_videoscale import VideoDataModule, benchmark_shapes
from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.cost import BucketBudget, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning import BucketPlanner, SampleTable
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.timing import StepTimes, StepWindow, subscribe_to_steps

STRATEGIES = {"ulysses_ddp": SequenceParallelDDPStrategy, "ulysses_fsdp2": SequenceParallelFSDP2Strategy}
SAY_EVERY = 10


class Record(pl.Callback):
    """What each micro-batch of this rank was, and where its time went."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            rank, total = trainer.global_rank, sum(window.column(name) for name in StepTimes._fields)
            load = [window.column(name) for name in ("samples", "sequence_length", "predicted_cost", "loss_weight")]
            columns = [window.column("work"), window.column("wait"), total, *load[:3], (load[3] != 0).double()]
            self.rows = torch.stack([column[rank] for column in columns], dim=1).tolist()

        subscribe_to_steps(trainer, sys.maxsize, receive)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and (batch_idx + 1) % SAY_EVERY == 0:
            say(f"  {batch_idx + 1} micro-batches")


def module_of(config: dict[str, int]) -> RectifiedFlow:
    """The network with fused kernels, made where it will train: the host takes long to draw its weights."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with device:
        module = RectifiedFlow(config, attention="flash")
    inject_fused_kernels(module)
    return module


def strategy_of(name: str, ulysses: int) -> Any:
    """A new strategy."""
    return STRATEGIES[name](ulysses_size=ulysses, activation_checkpointing=True, attention_backend="sdpa", graphs=False)


def waits_of(strategy: str) -> Waits:
    """Where ranks wait for each other under a strategy."""
    return "slots" if strategy == "ulysses_fsdp2" else "steps"


def budget_of(table: SampleTable, m_mem: float, m_comp: float, step_time: StepTimeModel) -> BucketBudget:
    """Both in multiples of the longest sample."""
    longest, p = int(table.sequence_lengths.max()), step_time.power_law.p
    return BucketBudget(m_mem * longest, m_comp * float(longest) ** p, p)


def table_of(shards: str) -> SampleTable:
    """The samples as they are trained."""
    data = VideoDataModule(shards)
    data.setup("fit")
    return data.training_shapes()[0]


def matrix_of(
    module: RectifiedFlow,
    data: str | Sequence[ClipShape],
    seconds: float,
    tiny: bool,
    strategy: Any = None,
    max_tokens: int | None = None,
    file: Path | None = None,
) -> ShapeMatrix:
    """Step times of the shapes of shards or of these, under a strategy of the runs; collective."""
    given = {} if strategy is None else {"strategy": strategy}
    trainer = trainer_with(int(os.environ["WORLD_SIZE"]), tiny, max_steps=1, **given)
    shapes = VideoDataModule(data, budget=BucketBudget(1, 1)) if isinstance(data, str) else data
    return benchmark_shapes(
        trainer,
        module,
        shapes,
        max_shapes=3 if tiny else 8,
        max_tokens=max_tokens,
        seconds=seconds,
        progress=False,
        file=file,
    )


def rehearse(config: dict[str, int], cells: Sequence[Cell], strategy: Any, tiny: bool) -> None:
    """One block trains on these micro-batches: what loads a kernel at its first use, does so here; collective."""
    batches = RandomBatches()
    loader: Any = DataLoader(cells, batch_size=None, collate_fn=batches)  # type: ignore[arg-type, var-annotated]
    trainer = trainer_with(int(os.environ["WORLD_SIZE"]), tiny, strategy=strategy, max_epochs=1)
    trainer.fit(module_of(config | {"num_layers": 1}), loader)


def train(
    shards: str,
    planner: BucketPlanner,
    steps: int,
    warm_up: int,
    module: RectifiedFlow,
    strategy: Any,
    tiny: bool,
    report: Path | None = None,
) -> Columns:
    """The first steps of an epoch.

    Args:
        shards: What is trained on.
        planner: Whose balance, budget, K and costs count.
        steps: That count.
        warm_up: Steps before them.
        module: What is trained; used up.
        strategy: Of the Trainer.
        tiny: Whether on CPUs.
        report: Folder for the report.

    Returns:
        Every field of the micro-batches that count, (steps, data-parallel ranks, micro-batches).
    """
    data = VideoDataModule(
        shards,
        balance=planner.balance,
        budget=planner.budget,
        micro_batches=planner.micro_batches,
        step_time=planner.step_time,
        num_workers=2,
    )
    record, world = Record(), int(os.environ["WORLD_SIZE"])
    trainer = trainer_with(
        world,
        tiny,
        strategy=strategy,
        max_epochs=1,
        max_steps=warm_up + steps,
        accumulate_grad_batches=planner.micro_batches,
        callbacks=[record, *([] if report is None else [RunReport(report, every_n_steps=10)])],
    )
    trainer.fit(module, data)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, record.rows)
    del trainer, data, module
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return of_groups(columns_of(everyone, planner.micro_batches, warm_up), world // planner.dp_size)
