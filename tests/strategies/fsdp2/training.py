"""What the tests of `ulysses_fsdp2` train, and with which Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.wan_training import Clips, RectifiedFlow


def trainer(strategy: Strategy | str, **kwargs: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
    }
    return pl.Trainer(strategy=strategy, **(defaults | kwargs))


def clips(dtype: torch.dtype = torch.float32, batch_size: int = 1) -> DataLoader[Any]:
    return DataLoader(Clips((2, 4, 4), dtype, length=16), batch_size=batch_size)


def ddp(**kwargs: Any) -> SequenceParallelDDPStrategy:
    return SequenceParallelDDPStrategy(**kwargs)


def fsdp2(**kwargs: Any) -> SequenceParallelFSDP2Strategy:
    return SequenceParallelFSDP2Strategy(**kwargs)


def message(strategy: SequenceParallelFSDP2Strategy, module: pl.LightningModule, **kwargs: Any) -> str:
    try:
        trainer(strategy, **kwargs).fit(module, clips())
    except ValueError as error:
        return str(error)
    return "no error"


class Everything(RectifiedFlow):
    """A bare parameter, a child that is no network, a frozen network, and a network frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.scale = nn.Parameter(torch.rand(1) + 1)
            self.embedding = nn.Embedding(3, 16)  # fewer rows than ranks
            self.vae = nn.Linear(4, 4).requires_grad_(False)
            self.adapter = nn.Linear(16, 16).requires_grad_(False)
        for name, parameter in self.transformer.named_parameters():
            parameter.requires_grad_("attn" in name or name == "patch_embedding.bias")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        text = batch["text"] + self.embedding.weight.mean(0) + self.adapter(self.embedding(torch.tensor(1)))
        return self.loss(batch | {"text": text, "latents": self.vae(batch["latents"])})

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = (self(batch) * self.scale).sum()  # a parameter of its own after its own forward
        self.log("loss", loss)
        return loss
