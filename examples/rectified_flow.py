"""A LightningModule that trains a video transformer of diffusers with rectified flow.

It is an ordinary module: how a batch is built, split over ranks and weighted is the business of the DataModule and the
strategy, and how each transformer is called that of `video_transformers`. Wan, HunyuanVideo and LTX-Video were trained
this way. CogVideoX was not: it predicts v, of diffusion. From scratch it learns by this objective, too; published
weights need their own.
"""

import math
from itertools import pairwise
from typing import Any, Literal
from zlib import crc32

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from video_transformers import Text, build, predict, text_dim

TIMESTEPS = 1000  # transformers count time from 0 (data) to 1000 (noise)
EARLIEST = 0.1  # a clean prediction is divided by no smaller time to be a velocity
PLACES, LOUDNESS = 24, 16.0  # channels of `places`, and their amplitude


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
        config: Arguments of that class. If it predicts the velocity, its width (heads x head dimension) must not be
            below the channels of a patch of latents, else the noise cannot pass through.
        predicts: What the transformer's output is, the velocity as published models have it, or the clean latents, of
            which the velocity is (x_t - output) / t. Latents that are hardly compressed, such as those of the patch
            codec, lie in a small part of their space, and a small model learns them much sooner than their velocities
            (Li and He, "Back to Basics: Let Denoising Generative Models Denoise", 2025).
        add_places: Append `PLACES` channels to the input that say where a latent is. Rotary positions tell distances
            only, and from noise a model needs long to learn places of them.
        shift: How much more often than 1 large noise levels are trained and sampled, as Wan's and SD3's flow shift:
            t becomes shift t / (1 + (shift - 1) t).
        learning_rate: AdamW's, after warm-up.
        warmup_steps: Steps over which the learning rate rises linearly.
        decays: Let the learning rate fall to a twentieth, linearly over the Trainer's epochs.
        weight_decay: AdamW's.
        gradient_checkpointing: Recompute the blocks in the backward pass, to save memory.
    """

    def __init__(
        self,
        transformer: str,
        config: dict[str, Any],
        predicts: Literal["velocity", "clean"] = "velocity",
        add_places: bool = False,
        shift: float = 1.0,
        learning_rate: float = 1e-4,
        warmup_steps: int = 100,
        decays: bool = False,
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
        seen = torch.cat([noisy, places(noisy)], dim=1) if self.hparams.add_places else noisy
        output = predict(self.hparams.transformer, self.transformer, seen, time * TIMESTEPS, text)
        if self.hparams.predicts == "velocity":
            return output
        return (noisy - output) / time.clamp(min=EARLIEST).to(noisy.dtype).view(-1, 1, 1, 1, 1)

    @torch.no_grad()
    def sample(self, noise: Tensor, captions: list[str], steps: int = 24) -> Tensor:
        """Goes from noise (B, C, F, H, W) to latents, by Euler's method. All ranks that share the model take part."""
        latents, times = noise, self._shifted(torch.linspace(1, 0, steps + 1, device=noise.device))
        for now, then in pairwise(times):
            velocity = self(latents.to(self.dtype), now.expand(len(noise)), captions)
            latents = latents + (then - now) * velocity.to(latents)
        return latents

    def _shifted(self, time: Tensor) -> Tensor:
        return self.hparams.shift * time / (1 + (self.hparams.shift - 1) * time)

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
        time = self._shifted(torch.sigmoid(torch.randn(len(clean), device=self.device)))
        velocity = self(interpolate(clean, noise, time), time, batch["caption"])
        error = (velocity.float() - (noise - clean).float()).square().flatten(1).mean(dim=1)
        if self.hparams.predicts == "clean":  # the error of what is predicted, and not of a quotient by small times
            error = error * time.clamp(min=EARLIEST).square()
        return error.mean()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, weight_decay=self.hparams.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        """The learning rate of a step, as a part of the highest."""
        passed = self.trainer.current_epoch / self.trainer.max_epochs if self.hparams.decays else 0.0
        return min(1.0, (step + 1) / self.hparams.warmup_steps) * min(1.0, max(0.05, 1 - passed))


def interpolate(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Returns x_t = (1 - t) x + t ε for clean and noise (B, C, F, H, W) and time (B,)."""
    time = time.to(clean.dtype).view(-1, 1, 1, 1, 1)
    return (1 - time) * clean + time * noise


def places(latents: Tensor) -> Tensor:
    """Sines and cosines of where latents (B, C, F, H, W) are in time, height and width: (B, PLACES, F, H, W).

    They are louder than the noise, which a patch has many channels of.
    """
    sizes, channels = latents.shape[2:], []
    for dim, size in enumerate(sizes):
        place = torch.linspace(-1, 1, size, device=latents.device) if size > 1 else latents.new_zeros(1).float()
        shape = [size if other == dim else 1 for other in range(3)]
        for octave in range(PLACES // 6):
            angle = (math.pi / 2 * 2**octave * place).view(shape)
            channels += [angle.sin().expand(sizes), angle.cos().expand(sizes)]
    return (LOUDNESS * torch.stack(channels)).to(latents.dtype).expand(len(latents), -1, -1, -1, -1)
