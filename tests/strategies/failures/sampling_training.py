"""A user's training run that draws a video in a hook, on some ranks alone or on all, slowly or not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.wan_training import Clips, RectifiedFlow

STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}


def sample(module: RectifiedFlow) -> None:
    """A small video by diffusers' pipeline, whose text is encoded already."""
    pipeline = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), module.transformer)
    pipeline.set_progress_bar_config(disable=True)
    text = torch.zeros(1, 5, 16, device=module.device)
    pipeline(
        prompt_embeds=text, negative_prompt_embeds=text, height=32, width=32, num_frames=5, num_inference_steps=2,
        output_type="latent", generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


class Rollout(RectifiedFlow):
    """Goes from noise to a video in one step on the first two ranks, and in three on the others."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        video = batch["noise"]
        for step in range(3 if self.global_rank > 1 else 1):
            time = torch.full_like(batch["time"], 1000.0 - 300 * step)
            video = video - self.transformer(video, time, batch["text"]).sample
        return (video - batch["latents"]).square().mean()


class Samples(Callback):
    """Calls a function in a hook, the first time that it is called."""

    def __init__(self, hook: str, function: Callable[[RectifiedFlow], None]) -> None:
        self.function: Callable[[RectifiedFlow], None] | None = function
        setattr(self, hook, self.call)

    def call(self, trainer: pl.Trainer, module: RectifiedFlow, *_: Any) -> None:
        if self.function is not None and not trainer.sanity_checking:
            function, self.function = self.function, None
            function(module)


def on_one_rank(module: RectifiedFlow, rank: int) -> None:
    if module.global_rank == rank:
        sys.stdout.write(f"\nsamples at {time.time()}\n")
        sample(module)


def on_all_ranks(module: RectifiedFlow, late: int, seconds: float) -> None:
    if module.global_rank == late:
        time.sleep(seconds)
    sample(module)


def on_a_rank_that_waits_beside_the_messages(module: RectifiedFlow, rank: int) -> None:
    """One rank waits inside of the network, as for a device that replays a graph; the other never comes."""
    if module.global_rank == rank:
        hooks = module.transformer._forward_pre_hooks
        counts_the_call = next(iter(hooks))
        module.transformer.register_forward_pre_hook(lambda *_: time.sleep(600), prepend=True)
        hooks.move_to_end(counts_the_call, last=False)  # before any message
        sample(module)
    time.sleep(600)


def train(
    strategy: str,
    sp: int,
    function: Callable[[RectifiedFlow], None],
    hook: str,
    validate: bool = False,
    accelerator: str = "cpu",
    timeout: float = 120,
) -> None:
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](ulysses_size=sp, timeout=timedelta(seconds=timeout)), accelerator=accelerator,
        devices=2, max_epochs=2, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Samples(hook, function)],
    )  # fmt: skip
    loader = DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1)
    if validate:
        trainer.validate(RectifiedFlow(), loader)
    else:
        trainer.fit(RectifiedFlow(), loader, loader)


def train_and_sample_alone(strategy: str, sp: int, rank: int, hook: str, accelerator: str = "cpu") -> None:
    train(strategy, sp, partial(on_one_rank, rank=rank), hook, accelerator=accelerator)


def validate_and_sample_alone(strategy: str, sp: int, rank: int, hook: str) -> None:
    train(strategy, sp, partial(on_one_rank, rank=rank), hook, validate=True)


def train_and_sample_late(strategy: str, sp: int, late: int, seconds: float, hook: str) -> None:
    train(strategy, sp, partial(on_all_ranks, late=late, seconds=seconds), hook)


def train_and_wait_beside_the_messages(strategy: str, sp: int, rank: int, hook: str, timeout: float) -> None:
    train(strategy, sp, partial(on_a_rank_that_waits_beside_the_messages, rank=rank), hook, timeout=timeout)


def train_by_rollouts() -> None:
    trainer = pl.Trainer(
        strategy=SequenceParallelFSDP2Strategy(ulysses_size=2, timeout=timedelta(seconds=120)), accelerator="cpu",
        devices=4, max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Rollout(), DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1))
