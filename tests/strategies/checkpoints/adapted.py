"""A Wan that trains by adapters alone: added in several ways, under all strategies, stopped and gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
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
        return self.predict_step(batch + torch.randn_like(batch)).square().mean()

    def predict_step(self, batch: Tensor) -> Tensor:
        times, text = torch.full((len(batch),), 500.0), torch.ones(len(batch), 5, 16)
        return self.transformer(batch, times.to(batch.device), text.to(batch.device)).sample

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # An eps of the gradients' size: smaller ones make whole steps of the weights from the rounding of zeros.
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=0.1)


class Surrounded(Adapted):
    """Beside the network: a frozen teacher that moves, a frozen encoder, and statistics that training writes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.teacher = nn.Linear(3, 3).requires_grad_(False)
            self.encoder = nn.Linear(3, 3).requires_grad_(False)
        self.statistics = nn.BatchNorm1d(4).requires_grad_(False)

    def training_step(self, batch: Tensor) -> Tensor:
        self.statistics(batch.flatten(2))
        self.teacher.weight.mul_(0.5)
        return super().training_step(batch)


@torch.no_grad()
def look(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    clip, text = torch.randn(1, 4, 2, 4, 4, generator=generator), torch.randn(1, 5, 16, generator=generator)
    device, threads = next(model.parameters()).device, torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks: with more, matrix products may round in another order
    try:
        return model.eval()(clip.to(device), torch.tensor([300.0], device=device), text.to(device)).sample.cpu()
    finally:
        torch.set_num_threads(threads)


class Look(Callback):
    """What the network says of a clip when training ends; a checkpoint after the first epoch."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.seen = look(module.transformer)
        module.train()


def strategy_of(name: str, **options: Any) -> Any:
    if name.startswith("zero"):
        return SequenceParallelDeepSpeedStrategy(int(name[4:]), **options)
    return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[name](**options)


@contextmanager
def trainer(strategy: str, epochs: int, callbacks: Any = (), **options: Any) -> Iterator[pl.Trainer]:
    torch.manual_seed(5)
    accelerator = "gpu" if dist.get_backend() == "nccl" else "cpu"
    with deepspeed_on_cpu() if strategy.startswith("zero") and accelerator == "cpu" else nullcontext():
        yield pl.Trainer(
            strategy=strategy_of(strategy, **options), accelerator=accelerator, devices=dist.get_world_size(),
            max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip


def clips() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(4, 4, 2, 4, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)


def fit(
    module: pl.LightningModule, strategy: str, epochs: int, start: Path | None = None, end: Path | None = None,
    callbacks: Any = (), **options: Any,
) -> pl.Trainer:  # fmt: skip
    with trainer(strategy, epochs, callbacks, **options) as runner:
        runner.fit(module, clips(), ckpt_path=start)
        if end is not None:
            runner.save_checkpoint(end)
    return runner


def predict(module: pl.LightningModule, path: Path | None, strategy: str = "ddp") -> Tensor:
    with trainer(strategy, 1) as runner:
        return torch.cat(runner.predict(module, clips(), ckpt_path=path))


def stop_and_go_on(
    strategy: str, way: str, kind: str, folder: Path, then: str | None = None,
    module_class: type[Adapted] = Adapted, average: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Saves ``one.ckpt`` after an epoch, ``whole.ckpt`` after two, and ``two.ckpt`` after the first was continued.

    Returns:
        What the network says of a clip after two epochs.
    """
    seen = Look(folder / "one.ckpt")

    def callbacks() -> list[Callback]:
        return [EMAWeightAveraging(decay=0.5)] if average else []

    fit(module_class(way, kind), strategy, 2, None, folder / "whole.ckpt", [*callbacks(), seen], **options)
    # Other initial values of the adapters, and the same base.
    again = module_class(way, kind, seed=8)
    fit(again, then or strategy, 2, folder / "one.ckpt", folder / "two.ckpt", callbacks(), **options)
    return seen.seen
