"""A fixed, invertible codec from pixels to latents that stands in for a video VAE.

Diffusion transformers train on the latents of a VAE, whose weights are a download of their own. So that the demo needs
none, `PatchCodec` does the part of a VAE's work that shapes the training: it turns space-time patches into channels,
treats time causally as Wan's VAE does, and gives latents of about unit standard deviation. It compresses nothing.
"""

import math

import torch
from torch import Tensor


class PatchCodec:
    """Turns each space-time patch of pixels into the channels of one latent pixel, by an orthonormal DCT.

    Frames are grouped as in Wan's VAE: the first frame alone, then groups of four, so that F = 4k + 1 frames become
    k + 1 latent frames and a still image is a video of one frame. The first frame is repeated to fill its group, hence
    a still scene has the same latents in every latent frame.

    Args:
        spatial_factor: Side of a patch in pixels.
        scale: Constant factor on the latents; natural videos in [-1, 1] have a standard deviation of about a half.
    """

    temporal_factor = 4

    def __init__(self, spatial_factor: int = 4, scale: float = 2.0) -> None:
        self.spatial_factor = spatial_factor
        self.scale = scale
        self.channels = 3 * self.temporal_factor * spatial_factor**2
        self._time_basis = _dct_basis(self.temporal_factor)
        self._space_basis = _dct_basis(spatial_factor)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes videos.

        Args:
            pixels: Float tensor (B, 3, F, H, W) in [-1, 1], F = 4k + 1, H and W multiples of `spatial_factor`.

        Returns:
            Latents (B, 12 · spatial_factor², (F - 1) / 4 + 1, H / spatial_factor, W / spatial_factor).

        Raises:
            ValueError: If the frames or the sides do not fit the patches.
        """
        frames, height, width = pixels.shape[2:]
        t, s = self.temporal_factor, self.spatial_factor
        if (frames - 1) % t or height % s or width % s:
            raise ValueError(
                f"A clip of {frames} frames of {height}x{width} pixels does not fit patches of {t} frames and {s}x{s} "
                f"pixels: use {t}k + 1 frames and sides that are multiples of {s}."
            )
        first_group = pixels[:, :, :1].expand(-1, -1, t, -1, -1)
        grouped = torch.cat([first_group, pixels[:, :, 1:]], dim=2)
        patches = grouped.unflatten(2, (-1, t)).unflatten(4, (-1, s)).unflatten(6, (-1, s))
        time, space = self._time_basis.to(pixels), self._space_basis.to(pixels)
        coefficients = torch.einsum("bcfthiwj,ut,yi,xj->bcuyxfhw", patches, time, space, space)
        return self.scale * coefficients.flatten(1, 4)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents; the exact inverse of `encode` up to rounding.

        Args:
            latents: Float tensor (B, 12 · spatial_factor², k + 1, h, w).

        Returns:
            Pixels (B, 3, 4k + 1, h · spatial_factor, w · spatial_factor), in [-1, 1] where the latents came from there.
        """
        t, s = self.temporal_factor, self.spatial_factor
        coefficients = (latents / self.scale).unflatten(1, (3, t, s, s))
        time, space = self._time_basis.to(latents), self._space_basis.to(latents)
        patches = torch.einsum("bcuyxfhw,ut,yi,xj->bcfthiwj", coefficients, time, space, space)
        grouped = patches.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        first_frame = grouped[:, :, :t].mean(dim=2, keepdim=True)
        return torch.cat([first_frame, grouped[:, :, t:]], dim=2)


def _dct_basis(size: int) -> Tensor:
    """Returns the orthonormal DCT-II matrix (frequency, position) in float64."""
    frequency, position = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    basis = torch.cos(math.pi * frequency.double() * (position + 0.5) / size) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis
