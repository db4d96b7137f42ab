"""`strategy.verify_parity`: a user's own check that the split changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import sharding
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.strategies.parity import ParityReport
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import lifted_float_casts

Ranks = Callable[[int], ProcessPool]


class Verify(pl.Callback):
    """What a user writes."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SequenceParallelDDPStrategy | SequenceParallelFSDP2Strategy)
        self.report = strategy.verify_parity(pl_module, self.batch)


def verify(strategy: str, plant_a_bug: bool, **arguments: Any) -> ParityReport:
    clips = DataLoader(Clips((3, 6, 10), torch.float64), batch_size=2)
    callback = Verify(next(iter(clips)))
    original = sharding._Gather.backward
    if plant_a_bug:

        def unscaled(ctx: Any, grad: torch.Tensor) -> Any:
            piece, *rest = original(ctx, grad)
            return piece / ctx.place.sp.size, *rest

        sharding._Gather.backward = unscaled
    classes = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
    torch.manual_seed(3)
    model = RectifiedFlow(own_noise=True)
    try:
        with lifted_float_casts():
            pl.Trainer(
                strategy=classes[strategy](**({"activation_checkpointing": True} | arguments)),
                accelerator="cpu",
                devices=4,
                plugins=[DoublePrecision()],
                max_steps=2,
                callbacks=[callback],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(model, clips)
    finally:
        sharding._Gather.backward = original
    return callback.report


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        pytest.param("ddp", {"ulysses_size": 2, "ring_size": 2}, marks=pytest.mark.full),
        pytest.param("ddp", {"ulysses_size": 2}, marks=pytest.mark.full),
        ("fsdp2", {"ulysses_size": 4}),
        pytest.param("fsdp2", {"ulysses_size": 4, "activation_checkpointing": 0.5}, marks=pytest.mark.full),
    ],
)
def test_it_finds_no_difference_where_there_is_none(ranks: Ranks, strategy: str, arguments: dict[str, Any]) -> None:
    for report in ranks(4).run(verify, strategy, False, **arguments):
        assert report.loss[0] == pytest.approx(report.loss[1], rel=1e-12)
        assert report.gradient_norm[0] == pytest.approx(report.gradient_norm[1], rel=1e-12)
        assert report.worst[1] <= 1e-10
        assert len(report.gradient_errors) > 40


def test_it_finds_a_wrong_gradient(ranks: Ranks) -> None:
    for report in ranks(4).run(verify, "ddp", True, ulysses_size=4):
        assert report.loss[0] == pytest.approx(report.loss[1], rel=1e-12)
        assert report.gradient_norm[0] == pytest.approx(report.gradient_norm[1] / 4, rel=1e-2)
        assert report.worst[1] == pytest.approx(0.75, rel=1e-6)
        assert "largest gradient error 7.50e-01" in str(report)


def call_too_early() -> str:
    try:
        SequenceParallelDDPStrategy().verify_parity(RectifiedFlow(), {})
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_it_says_when_to_call_it(ranks: Ranks) -> None:
    assert "such as in on_fit_start" in ranks(4).run(call_too_early)[0]
