"""Pixels to latents and captions to embeddings while training, where shards hold raw media.

A batch is encoded by the process that has read it, on the device that it trains on, and before it is shared: the ranks
of a sequence-parallel group read in turn, so each batch is encoded once per group.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.encoding.text import TransformersText
from lightning_videoscale.data.encoding.vae import DiffusersVae
from lightning_videoscale.data.planning.micro_batch import Batch


class BatchEncoder(Protocol):
    """What makes the model's inputs of a batch as it was read; an ``nn.Module`` from batches to batches will do.

    It runs on one rank of a sequence-parallel group and may hold no collective. What it draws from torch's global
    generators depends on the batch's place in the run, and not on which rank encodes.
    """

    def to(self, device: torch.device) -> Any:
        """Moves to the device that encodes."""

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch with what it was encoded to.

        Args:
            batch: As it was read: tensors in host memory, ``video`` (B, 3, F, H, W) uint8.
        """


def check_encoder(encode: BatchEncoder | None, geometry: ModelGeometry) -> None:
    """Looks whether an encoder can be used.

    Raises:
        TypeError: If it cannot be moved to a device, as a plain function.
        ValueError: If it has a ``geometry`` whose VAE is not that of the model's.
    """
    if encode is not None and not hasattr(encode, "to"):
        raise TypeError(
            f"encode={encode!r} must be called with a batch and have a method to(device): give an OnlineEncoder, or an "
            "nn.Module whose forward makes a batch of a batch."
        )
    own = getattr(encode, "geometry", None)
    strides = [(g.temporal_stride, g.spatial_stride) for g in (own, geometry) if isinstance(g, ModelGeometry)]
    if len(set(strides)) > 1:
        raise ValueError(
            f"The encoder's VAE makes (frames, pixels) = {strides[0]} into one latent cell, and the model's geometry "
            f"says {strides[1]}: give VideoDataModule the geometry of the model that the VAE belongs to."
        )


class OnlineEncoder:
    """Encodes videos with a VAE, captions with a text encoder, or both.

    ``video`` becomes ``latents`` (B, C, f, h, w) float32, the same that `videoscale encode` writes but for the
    rounding there, and ``meta`` tells their sides. ``caption`` stays, and ``text_embeds`` (B, L, D) and ``text_mask``
    (B, L) join it. What is there already is left as it is: a batch of latents, of embeddings.

    Args:
        vae: Encodes videos; None leaves pixels.
        text: Encodes captions; None leaves them.
    """

    def __init__(self, vae: DiffusersVae | None = None, text: TransformersText | None = None) -> None:
        self._vae = vae
        self._text = text

    @property
    def geometry(self) -> ModelGeometry | None:
        """What the VAE belongs to; None without one."""
        return None if self._vae is None else self._vae.geometry

    def to(self, device: torch.device) -> None:
        """Encodes there from now on."""
        for part in (self._vae, self._text):
            if part is not None:
                part.to(device)

    def __call__(self, batch: Batch) -> Batch:
        """Encodes a batch; what it makes lies on the device, the rest where it was."""
        if self._vae is not None and "video" in batch:
            latents = self._vae.encode_batch(batch["video"])
            _, _, frames, height, width = latents.shape
            # In the place of the pixels: Lightning takes the batch size from the first tensor.
            batch = {("latents" if name == "video" else name): value for name, value in batch.items()}
            meta = batch["meta"]._replace(frames=frames, height=height, width=width)
            batch = batch | {"latents": latents, "meta": meta}
        if self._text is not None and "text_embeds" not in batch:
            text = self._text.encode(batch["caption"])
            batch = batch | {"text_embeds": text.embeds, "text_mask": text.mask}
        return batch
