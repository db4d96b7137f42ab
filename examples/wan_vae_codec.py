"""Wan's own VAE behind the interface of `PatchCodec`, for those who have its weights."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor


class WanVaeCodec:
    """Encodes videos to the normalised latents that Wan is trained on.

    Args:
        path: Folder of a saved `AutoencoderKLWan`, or its name on the Hugging Face Hub.
        device: Where to encode and decode.
    """

    def __init__(self, path: str | Path, device: str | torch.device = "cpu") -> None:
        self.vae = AutoencoderKLWan.from_pretrained(path).eval().requires_grad_(False).to(device)
        self.temporal_factor: int = self.vae.config.scale_factor_temporal
        self.spatial_factor: int = self.vae.config.scale_factor_spatial
        self.channels: int = self.vae.config.z_dim
        self._mean = torch.tensor(self.vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(self.vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes pixels (B, 3, F, H, W) in [-1, 1] to latents (B, channels, (F - 1) / 4 + 1, H / 8, W / 8)."""
        posterior = self.vae.encode(pixels.to(self._mean)).latent_dist
        return ((posterior.mode() - self._mean) / self._std).to(pixels)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, channels, k + 1, h, w) to pixels (B, 3, 4k + 1, 8h, 8w) in about [-1, 1]."""
        return self.vae.decode(latents.to(self._mean) * self._std + self._mean).sample.to(latents)
