"""A LightningModule that trains a video transformer of diffusers with rectified flow.

It is an ordinary module: how a batch is built, split over ranks and weighted is the business of the DataModule and the
strategy, and how each transformer is called that of `video_transformers`. Wan, HunyuanVideo and LTX-Video were trained
this way. CogVideoX was not: it predicts v, of diffusion. From scratch it learns by this objective, too; published
weights need their own.
"""

from typing import Any
from zlib import crc32

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from video_transformers import Text, build, predict, text_dim

TIMESTEPS = 1000  # transformers count time from 0 (data) to 1000 (noise)


class HashedWords(nn.Module):
    """A trainable embedding of words by their hash: a small stand-in for a text encoder, which is a download.

    Args:
        dim: Size of a word's embedding, which the transformer decides.
        buckets: Number of embeddings; words whose hashes collide share one.
        length: Number of words kept; shorter captions are padded with zeros. Where text attends together with the
            video, the DataModule's geometry has as many text tokens.
    """

    def __init__(self, dim: int, buckets: int = 1024, length: int = 8) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(buckets, dim, padding_idx=0)

    def forward(self, captions: list[str]) -> Text:
        """Embeds B captions as (B, length, dim). One without words has a token all the same, of zeros."""
        ids = torch.zeros(len(captions), self.length, dtype=torch.long)
        for row, caption in zip(ids, captions, strict=True):
            for position, word in enumerate(caption.lower().split()[: self.length]):
                row[position] = 1 + crc32(word.encode()) % (self.embedding.num_embeddings - 1)
        ids = ids.to(self.embedding.weight.device)
        mask = ids != 0
        mask[:, 0] = True
        return Text(self.embedding(ids), mask)


class RectifiedFlow(pl.LightningModule):
    """Rectified flow: on the straight line x_t = (1 - t) x + t ε, predict its velocity ε - x.

    Args:
        transformer: Name of the transformer's class in diffusers, one of `video_transformers.FAMILIES`.
        config: Arguments of that class. Its width (heads x head dimension) must not be below the channels of a patch of
            latents, else the noise cannot pass through.
        learning_rate: AdamW's, after warm-up.
        warmup_steps: Steps over which the learning rate rises linearly.
        weight_decay: AdamW's.
        gradient_checkpointing: Recompute the blocks in the backward pass, to save memory.
    """

    def __init__(
        self,
        transformer: str,
        config: dict[str, Any],
        learning_rate: float = 1e-4,
        warmup_steps: int = 100,
        weight_decay: float = 0.01,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.transformer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.transformer is not None:
            return
        self.transformer = build(self.hparams.transformer, self.hparams.config)
        self.caption_embedding = HashedWords(text_dim(self.hparams.transformer, self.transformer.config))
        if self.hparams.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()

    def forward(self, noisy: Tensor, time: Tensor, captions: list[str]) -> Tensor:
        """Predicts the velocity of latents (B, C, F, H, W) at times (B,) in [0, 1]."""
        text = self.caption_embedding(captions)
        return predict(self.hparams.transformer, self.transformer, noisy, time * TIMESTEPS, text)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        clean = batch["latents"].to(self.dtype)
        noise = torch.randn_like(clean)
        # Logit-normal times: the middle of the line is where there is most to learn.
        time = torch.sigmoid(torch.randn(len(clean), device=self.device))
        velocity = self(interpolate(clean, noise, time), time, batch["caption"])
        return F.mse_loss(velocity.float(), (noise - clean).float())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, weight_decay=self.hparams.weight_decay
        )
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def interpolate(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Returns x_t = (1 - t) x + t ε for clean and noise (B, C, F, H, W) and time (B,)."""
    time = time.to(clean.dtype).view(-1, 1, 1, 1, 1)
    return (1 - time) * clean + time * noise
