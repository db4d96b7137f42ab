"""A Wan in training with `SampleVideos` around it: diffusers' pipeline with all its parts, tiny and random."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from lightning.pytorch.callbacks import Callback
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, UMT5EncoderModel

from lightning_videoscale.callbacks import EMA, SampleVideos
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.data.encoders import save_pipeline
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu

CALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 6}
PROMPTS = ["1 2 3", "4 5", "7 7 7"]


def save_parts(folder: Path) -> Path:
    """The parts of a pipeline beside its transformer."""
    return save_pipeline(folder, width=16)


class Pipelines:
    """Makes a pipeline around the network in training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, module: RectifiedFlow) -> WanPipeline:
        return WanPipeline(
            tokenizer=AutoTokenizer.from_pretrained(self.folder / "tokenizer"),
            text_encoder=UMT5EncoderModel.from_pretrained(self.folder / "text_encoder"),
            vae=AutoencoderKLWan.from_pretrained(self.folder / "vae"),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            transformer=module.transformer,
        )


class Drawing(RectifiedFlow):
    """Draws its noise from the generators that samplers draw from too, and has a part that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__(num_layers=1, own_noise=True)
        self.transformer.condition_embedder.eval()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        noisy = {name: x * (1 + random.random()) * np.random.rand() for name, x in batch.items()}
        return super().training_step(noisy)


class State(Callback):
    """Losses, and after every step what a sampling could have changed."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.modes: list[list[bool]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.modes.append([child.training for child in module.modules()])
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def strategy(name: str, sp: int) -> Any:
    if name == "auto":
        return "auto"
    if name.startswith("zero"):
        return SequenceParallelDeepSpeedStrategy(int(name[-1]), ulysses_size=sp, verify_plan=False)  # as `Run` does
    return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[name](ulysses_size=sp)


def train(
    name: str,
    sp: int,
    *callbacks: Callback,
    module: RectifiedFlow | None = None,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> tuple[State, pl.Trainer]:
    """Four micro-batches, two to a step."""
    state = State()
    defaults: dict[str, Any] = {"accumulate_grad_batches": 2, "logger": False, "max_epochs": 1}
    on_gpus = dist.is_initialized() and dist.get_backend() == "nccl"
    with ExitStack() as contexts:
        if on_gpus:  # whose other kernels add up in any order
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        elif name.startswith("zero"):
            contexts.enter_context(deepspeed_on_cpu())
        trainer = pl.Trainer(
            strategy=strategy(name, sp),
            accelerator="gpu" if on_gpus else "cpu",
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            callbacks=[*callbacks, state],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **(defaults | kwargs),
        )
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        dp = trainer.world_size // sp
        clips = DataLoader(Clips((2, 4, 4), torch.float32, length=4 * dp), batch_size=1)
        trainer.fit(module or Drawing(), clips, ckpt_path=ckpt_path)
    return state, trainer


def train_and_sample(name: str, sp: int, parts: Path, folder: Path) -> bool:
    """Whether losses and train modes are the same without and with sampling, to the bit; averages are kept in both."""
    without, _ = train(name, sp, EMA(0.5))
    samples = SampleVideos(Pipelines(parts), PROMPTS, every_n_steps=2, folder=folder, **CALL)
    sampled, _ = train(name, sp, samples, EMA(0.5))
    return len(sampled.losses) == 4 and without.losses == sampled.losses and without.modes == sampled.modes


def messages(parts: Path, folder: Path) -> list[str]:
    """What is said of ``on_error="warn"`` under strategies whose ranks sample alone, and together."""
    found = []
    for name, sp in (("ddp", 1), ("ddp", 2), ("fsdp2", 1)):
        samples = SampleVideos(Pipelines(parts), PROMPTS, every_n_steps=9, folder=folder, on_error="warn", **CALL)
        try:
            train(name, sp, samples)
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
    return found
