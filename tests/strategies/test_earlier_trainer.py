"""A LightningModule that one Trainer has trained is given to a Trainer with another strategy, as in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.strategies.fsdp2.training import clips, trainer

Ranks = Callable[[int], ProcessPool]


def train_one_after_the_other(first: str, second: str, folder: Path) -> tuple[str, int, int]:
    """The second Trainer's message, the steps that it makes with that module, and with another from a checkpoint."""
    with deepspeed_on_cpu() if "deepspeed" in first + second else torch.enable_grad():
        module = RectifiedFlow()
        before, after = trainer(first), trainer(second)
        before.fit(module, clips())
        before.save_checkpoint(folder / "first.ckpt")
        message = ""
        try:
            after.fit(module, clips())
        except ValueError as error:
            message = str(error)
        goes_on = trainer(second, max_steps=3)
        goes_on.fit(RectifiedFlow(), clips(), ckpt_path=folder / "first.ckpt")
        return message, after.global_step, goes_on.global_step


def check_refused(ranks: Ranks, folder: Path, first: str, second: str, held: str) -> None:
    for message, steps, from_checkpoint in ranks(2).run(train_one_after_the_other, first, second, folder):
        assert held in message and "ckpt_path=" in message
        assert (steps, from_checkpoint) == (0, 3)


def test_shards_are_not_replicated(ranks: Ranks, tmp_path: Path) -> None:
    check_refused(ranks, tmp_path, "ulysses_fsdp2", "ulysses_ddp", held="'transformer.blocks.0'")


@needs_deepspeed
@pytest.mark.parametrize(
    ("first", "second", "held"),
    [
        pytest.param("ulysses_fsdp2", "ulysses_deepspeed_stage_2", "'transformer.blocks.0'", marks=pytest.mark.full),
        pytest.param("ulysses_deepspeed_stage_2", "ulysses_ddp", "DeepSpeed", marks=pytest.mark.full),
        ("ulysses_deepspeed_stage_3", "ulysses_fsdp2", "DeepSpeed"),
    ],
)
def test_what_zero_holds_is_left_alone(ranks: Ranks, tmp_path: Path, first: str, second: str, held: str) -> None:
    check_refused(ranks, tmp_path, first, second, held)
