"""How many tokens a model makes of a clip: the factors of its VAE and of its patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.families import AllFamilies

_Frames = TypeVar("_Frames", int, NDArray[np.int64])


@dataclass(frozen=True)
class ModelGeometry:
    """From pixels to tokens.

    Args:
        temporal_stride: Frames that the VAE makes into one latent frame. The first frame stands alone (the VAE is
            causal), so clips have ``temporal_stride * k + 1`` frames.
        spatial_stride: Pixels per latent cell, in height and in width.
        patch_size: Latent frames, rows and columns that make one token.
        text_tokens: Text tokens that attend jointly with the visual ones; 0 where text enters by cross-attention.
        pads_frames: Whether the model is given more latent frames where they are no whole patches; else such clips are
            refused.
    """

    temporal_stride: int = 4
    spatial_stride: int = 8
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_tokens: int = 0
    pads_frames: bool = False

    @property
    def side_multiple(self) -> int:
        """What height and width in pixels must be multiples of (the larger of the two patch sides decides)."""
        return self.spatial_stride * max(self.patch_size[1:])

    def whole_frames(self, frames: _Frames) -> _Frames:
        """Returns the largest ``temporal_stride * k + 1`` that is at most ``frames`` (at least 1)."""
        return (frames - 1) // self.temporal_stride * self.temporal_stride + 1

    def latent_frames(self, frames: _Frames) -> _Frames:
        """Returns (F − 1) / λ + 1, the latent frames of F frames."""
        return (frames - 1) // self.temporal_stride + 1

    def sequence_length(self, frames: Any, height: Any, width: Any, *, latents: Any = False) -> Any:
        """Tokens S = S_visual + S_text of one sample (AdaptiveLoad, section on sequence length).

        Args:
            frames: Frames, or latent frames where ``latents``; an int or an array, as all of these.
            height: Rows of pixels, or of latents.
            width: Columns likewise.
            latents: Whether the sizes are those of latents.

        Returns:
            S, an int or an int64 array.

        Raises:
            ValueError: If the latents cannot be cut into whole patches.
        """
        in_pixels = np.logical_not(latents)
        stride = np.where(in_pixels, self.spatial_stride, 1)
        in_time = np.where(in_pixels, self.latent_frames(np.asarray(frames)), frames)
        if self.pads_frames:
            in_time = -(-in_time // self.patch_size[0]) * self.patch_size[0]
        sides = in_time, height // stride, width // stride
        broken = np.zeros(np.broadcast(*sides).shape, bool)
        for side, patch in zip(sides, self.patch_size, strict=True):
            broken |= np.asarray(side % patch != 0)
        if broken.any():
            first = tuple(int(np.broadcast_to(side, broken.shape)[broken][0]) for side in sides)
            raise ValueError(
                f"Latents of (frames, height, width) = {first} cannot be cut into patches of {self.patch_size}: every "
                "side must be a multiple. Crop or resize such clips when the shards are written, or give the model's "
                "own patch_size."
            )
        tokens = sides[0] * sides[1] * sides[2] // np.prod(self.patch_size) + self.text_tokens
        return int(tokens) if np.ndim(tokens) == 0 else tokens.astype(np.int64)


GEOMETRIES = AllFamilies[ModelGeometry]("GEOMETRIES")
"""By model family."""
