"""A Wan that trains by adapters alone: added in several ways, under all strategies, stopped and gone on with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.distributed.zero import deepspeed_on_cpu
from tests.models import tiny_wan

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"lora_alpha": 6},  # not r
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_alpha": 3, "alpha_pattern": {"to_q": 7}, "rank_pattern": {"net.2": 3}},
    "head": {"modules_to_save": ["proj_out"]},
    "pissa": {"init_lora_weights": "pissa"},
}


def config(kind: str) -> peft.LoraConfig:
    defaults = {"r": 2, "target_modules": ["to_q", "net.2"], "init_lora_weights": False}
    return peft.LoraConfig(**(defaults | CONFIGS[kind]))


class Adapted(pl.LightningModule):
    """Trains adapters of the Wan in ``transformer``.

    Args:
        way: ``"add_adapter"`` of diffusers, ``"get_peft_model"``, ``"two"`` adapters, of which one trains, or
            ``"inject"`` without a word about it on the model.
        kind: As in `CONFIGS`.
        seed: Of the adapters' initial values.
        **network: As for `tiny_wan`.
    """

    def __init__(self, way: str = "add_adapter", kind: str = "lora", seed: int = 0, **network: Any) -> None:
        super().__init__()
        self.transformer: Any = tiny_wan(**network)
        torch.manual_seed(seed)
        if way == "get_peft_model":
            self.transformer = peft.get_peft_model(self.transformer, config(kind))
        elif way == "inject":
            peft.inject_adapter_in_model(config(kind), self.transformer)
            del self.transformer.peft_config
        else:
            self.transformer.requires_grad_(False)
            if way == "two":
                self.transformer.add_adapter(config("lora"), "first")
            self.transformer.add_adapter(config(kind), "style")

    def training_step(self, batch: Tensor) -> Tensor:
        noisy = batch + torch.randn_like(batch)
        times = torch.full((len(batch),), 500.0)
        return self.transformer(noisy, times, torch.ones(len(batch), 5, 16)).sample.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Small steps for all of what the class may add; LoRA's need large ones to be seen.
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


@torch.no_grad()
def look(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    clip, text = torch.randn(1, 4, 2, 4, 4, generator=generator), torch.randn(1, 5, 16, generator=generator)
    return model.eval()(clip, torch.tensor([300.0]), text).sample


class Look(Callback):
    """What the network says of a clip when training ends."""

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.seen = look(module.transformer)
        module.train()


def strategy_of(name: str, **options: Any) -> Any:
    if name.startswith("zero"):
        return SequenceParallelDeepSpeedStrategy(int(name[4:]), **options)
    return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[name](**options)


def fit(
    module: pl.LightningModule, strategy: str, epochs: int, start: Path | None = None, end: Path | None = None,
    callbacks: Any = (), **options: Any,
) -> pl.Trainer:  # fmt: skip
    torch.manual_seed(5)
    with deepspeed_on_cpu() if strategy.startswith("zero") else nullcontext():
        runner = pl.Trainer(
            strategy=strategy_of(strategy, **options), accelerator="cpu", devices=dist.get_world_size(),
            max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        clips = torch.randn(4, 4, 2, 4, 4, generator=torch.Generator().manual_seed(1))
        runner.fit(module, DataLoader(clips, batch_size=2), ckpt_path=start)
        if end is not None:
            runner.save_checkpoint(end)
    return runner


def stop_and_go_on(strategy: str, way: str, kind: str, folder: Path, then: str | None = None) -> Tensor:
    """Saves ``whole.ckpt`` after two epochs, ``one.ckpt`` after one and ``two.ckpt`` after it was continued."""
    seen = Look()
    fit(Adapted(way, kind), strategy, 2, None, folder / "whole.ckpt", [seen])
    fit(Adapted(way, kind), strategy, 1, None, folder / "one.ckpt")
    # Its own initial values differ; the base's do not.
    fit(Adapted(way, kind, seed=8), then or strategy, 2, folder / "one.ckpt", folder / "two.ckpt")
    return seen.seen
