"""Wan 2.2 A14B: a LightningModule that holds two transformers, of which the timestep chooses one.

Losses and gradients are those of one device, also where the groups of a step need different experts and the strategy
can do that; where it cannot, all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.distributed.parity import SHAPES, Outcome, Record, RecordOfUsed, ZeroRecord
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, float64_inside, needs_deepspeed
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]

TOGETHER = (0.9, 0.8, 0.2, 0.3, 0.7, 0.6)  # both groups take the expert of high noise, of low noise, of high noise
APART = (0.9, 0.2, 0.3, 0.7)
LOW = (0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class Case:
    """A training of a micro-batch for each two times; by default on one device.

    Attributes:
        backend: ``"ddp"``, ``"ddp_unused"`` (finds unused parameters), ``"fsdp2"``, ``"zero2"``, ``"zero3"``.
        times: Of the clips, one for each of two groups and micro-batch; from 0.5 on the noise is high.
        trained: Which experts.
        accumulation: Micro-batches of an optimizer step.
        ulysses: Ranks of a group.
    """

    backend: str
    times: tuple[float, ...] = TOGETHER
    trained: tuple[str, ...] = ("high", "low")
    accumulation: int = 1
    ulysses: int = 2


class TwoExperts(RectifiedFlow):
    """Each clip goes through the expert of its noise."""

    def __init__(self, trained: tuple[str, ...], compute_dtype: torch.dtype) -> None:
        self.trained = trained
        super().__init__(compute_dtype=compute_dtype)

    def build(self) -> None:
        self.high, self.low = tiny_wan(num_layers=1), tiny_wan(num_layers=1)
        with torch.no_grad():
            for parameter in self.low.parameters():
                parameter.mul_(1.1)
        for name in {"high", "low"} - set(self.trained):
            self.get_submodule(name).requires_grad_(False)

    @property
    def transformer(self) -> Any:
        return self.high if self.is_noisy else self.low

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = []
        for i in range(len(batch["time"])):
            self.is_noisy = float(batch["time"][i]) >= 0.5
            losses.append(super().loss({name: x[i : i + 1] for name, x in batch.items()}))
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # An eps of the gradients' size: smaller ones make whole steps of the weights from the rounding of zeros.
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01, eps=0.1)


def train(case: Case) -> Outcome | str:
    """What the training came to, or what was said against it."""
    is_zero = case.backend.startswith("zero")
    record: Record = ZeroRecord() if is_zero else RecordOfUsed()
    with ExitStack() as contexts:
        contexts.enter_context(float64_inside() if is_zero else lifted_float_casts())
        if is_zero:
            contexts.enter_context(deepspeed_on_cpu())
        trainer = pl.Trainer(
            strategy=strategy(case),
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[] if is_zero else [DoublePrecision()],
            accumulate_grad_batches=case.accumulation,
            max_epochs=1,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        clips = Clips(SHAPES["odd"], torch.float32, length=len(case.times))
        clips.tensors["time"] = torch.tensor(case.times)
        groups = dist.get_world_size() // case.ulysses
        sampler: Any = DistributedSampler(clips, groups, dist.get_rank() // case.ulysses, shuffle=False)
        loader = DataLoader(clips, batch_size=2 // groups, sampler=sampler)
        try:
            trainer.fit(TwoExperts(case.trained, torch.float64), loader)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return Outcome(record.losses, record.gradients, record.parameters)


def strategy(case: Case) -> Any:
    shared: dict[str, Any] = {"ulysses_size": case.ulysses, "modules": ["high", "low"]}
    if case.backend.startswith("ddp"):
        return SequenceParallelDDPStrategy(**shared, find_unused_parameters=case.backend == "ddp_unused")
    if case.backend == "fsdp2":
        return SequenceParallelFSDP2Strategy(**shared)
    deepspeed = SequenceParallelDeepSpeedStrategy(int(case.backend[4]), **shared)
    deepspeed.config["zero_optimization"]["memory_efficient_linear"] = False
    return deepspeed


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(Case("ddp_unused", times), marks=pytest.mark.full) for times in (TOGETHER, APART)),
        Case("ddp_unused", APART, accumulation=2),
        Case("ddp", LOW, ("low",)),
        Case("fsdp2"),
        pytest.param(Case("fsdp2", LOW, ("low",)), marks=pytest.mark.full),
        pytest.param(Case("zero2"), marks=[needs_deepspeed, pytest.mark.full]),
        pytest.param(Case("zero3"), marks=needs_deepspeed),
    ],
    ids=str,
)
def test_experts_train_as_on_one_device(ranks: Ranks, case: Case) -> None:
    alone = Case("ddp_unused", case.times, case.trained, case.accumulation, ulysses=1)
    ((losses, gradients, parameters),) = ranks(1).run(train, alone)
    everyone = ranks(4).run(train, case)
    assert not any(isinstance(said, str) for said in everyone), everyone
    tolerance = 1e-6 if case.backend.startswith("zero") else 1e-10
    mean = torch.tensor([theirs.losses for theirs in everyone], dtype=torch.float64).mean(0)
    assert mean.tolist() == pytest.approx(losses, rel=tolerance)
    assert len(gradients) == len(case.times) // 2 // case.accumulation
    for theirs in everyone:
        for mine, expected in zip(theirs.gradients, gradients, strict=True):
            assert gradient_error(mine, expected) <= tolerance
        assert gradient_error(theirs.parameters, parameters) <= tolerance
    assert all(
        any(step[name].norm() > 0 for step in gradients) for name in gradients[0] if name.startswith(case.trained)
    )


@pytest.mark.parametrize(
    "backend",
    [
        "ddp",
        "fsdp2",
        pytest.param("zero2", marks=[needs_deepspeed, pytest.mark.full]),
        pytest.param("zero3", marks=needs_deepspeed),
    ],
)
def test_groups_that_need_different_experts_are_told(ranks: Ranks, backend: str) -> None:
    said = ranks(4).run(train, Case(backend, APART))
    assert all("find_unused_parameters=True" in theirs for theirs in said), said
    where = ("high", "low") if backend in ("fsdp2", "zero3") else ("backward through high", "backward through low")
    for theirs in said:
        assert f"ranks [0, 1] came to {where[0]}, ranks [2, 3] came to {where[1]}" in theirs
