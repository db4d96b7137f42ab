"""A Wan trained as a user would, on clips that bring their own noise: what the parity tests have in common."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from tests.models import tiny_wan


class Clips(Dataset[dict[str, Tensor]]):
    """Latents (C, F, H, W), noise, time and text; the sequence has F · H/2 · W/2 tokens."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latents = torch.randn(length, 4, *shape, generator=generator, dtype=dtype)
        self.text = torch.randn(length, 5, 16, generator=generator, dtype=dtype)
        self.noise = torch.randn(length, 4, *shape, generator=generator, dtype=dtype)
        self.time = torch.rand(length, generator=generator, dtype=dtype)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[index] for name in ("latents", "text", "noise", "time")}


class RectifiedFlow(pl.LightningModule):
    """An ordinary training module: no line about sequence parallelism.

    Args:
        per_token_timesteps: As Wan 2.2 TI2V, which gives every token a timestep of its own.
        checkpointing: Use diffusers' own gradient checkpointing.
        own_noise: Draw noise and time in the step; else they come with the clips, and any number of data-parallel ranks
            together compute what one device computes on all their clips.
    """

    def __init__(
        self,
        per_token_timesteps: bool = False,
        checkpointing: bool = False,
        own_noise: bool = False,
        **config: Any,
    ) -> None:
        super().__init__()
        self.transformer = tiny_wan(**config)
        self.per_token_timesteps = per_token_timesteps
        self.own_noise = own_noise
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, noise, t = batch["latents"], batch["noise"], batch["time"]
        if self.own_noise:
            noise, t = torch.randn_like(x), torch.rand_like(t)
        tokens = x.shape[2] * x.shape[3] // 2 * x.shape[4] // 2
        spread = torch.linspace(0.5, 1, tokens, dtype=x.dtype, device=x.device)
        timestep = t[:, None] * spread if self.per_token_timesteps else t
        sigma = t.view(-1, 1, 1, 1, 1)
        velocity = self.transformer((1 - sigma) * x + sigma * noise, timestep * 1000, batch["text"]).sample
        return torch.nn.functional.mse_loss(velocity, noise - x)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor]) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class Record(Callback):
    """Keeps every loss and, for every optimizer step, the gradients it used: averaged, clipped and assembled."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if trainer.global_step > len(self.gradients):
            self.gradients.append(
                {name: assembled(p.grad) for name, p in module.named_parameters() if p.grad is not None}
            )


def assembled(x: Tensor) -> Tensor:
    """A copy of the whole tensor of which this rank may hold a shard; then collective."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()
