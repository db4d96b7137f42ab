"""A copy of a network that is split, as for a moving average, has weights of its own and is split like it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.blocks import checkpoint_activations
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import lifted_float_casts, tiny_wan


class Average(pl.Callback):
    """Validates with a moving average of the network, copied when the strategy has set the network up."""

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.average: nn.Module = copy.deepcopy(module.transformer).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for mean, parameter in zip(self.average.parameters(), module.transformer.parameters(), strict=True):
            mean.lerp_(parameter, 0.3)

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.average, module.transformer = module.transformer, self.average

    on_validation_epoch_end = on_validation_epoch_start


def validate_average(**settings: Any) -> float:
    module, clips = RectifiedFlow(), DataLoader(Clips((3, 2, 10), torch.float64))  # 15 tokens
    with lifted_float_casts():
        trainer = pl.Trainer(
            strategy=SequenceParallelDDPStrategy(**settings),
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[DoublePrecision()],
            max_steps=2,
            callbacks=[Average()],
            num_sanity_val_steps=0,
            val_check_interval=2,
            limit_val_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, clips, clips)
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_average_by_deepcopy(ranks: Callable[[int], ProcessPool], checkpointing: bool) -> None:
    (expected,) = ranks(1).run(validate_average)
    for got in ranks(2).run(validate_average, activation_checkpointing=checkpointing):
        assert got == pytest.approx(expected, rel=1e-10)


def test_a_copy_of_checkpointed_blocks_runs_its_own_weights() -> None:
    network = tiny_wan()
    inputs = torch.ones(1, 4, 1, 4, 4), torch.ones(1), torch.ones(1, 5, 16)
    undo = checkpoint_activations(network)
    copied = copy.deepcopy(network)
    with torch.no_grad():
        before = copied(*inputs).sample
        for parameter in network.blocks.parameters():
            parameter.zero_()
        assert torch.equal(copied(*inputs).sample, before)
    undo()
    assert all("forward" not in vars(block) for block in network.blocks)


def pickled_in_a_run() -> list[str]:
    said: list[str] = []

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            try:
                torch.save(module.transformer, io.BytesIO())
            except pickle.PicklingError as error:
                said.append(str(error))

    module = RectifiedFlow()
    strategy = SequenceParallelDDPStrategy()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    devices = dist.get_world_size()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=1, callbacks=[Saving()], **quiet
    )
    trainer.fit(module, DataLoader(Clips((3, 2, 10), torch.float32)))
    pickle.dumps(module.transformer)  # as it was again
    return said


def test_a_split_network_says_that_it_cannot_be_pickled(ranks: Callable[[int], ProcessPool]) -> None:
    for said in ranks(2).run(pickled_in_a_run):
        assert len(said) == 1
        assert "WanTransformer3DModel" in said[0] and "state_dict()" in said[0]
