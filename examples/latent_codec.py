"""What the examples ask of a codec between pixels and latents, and the choice of one."""

from typing import Protocol

from patch_codec import PatchCodec
from torch import Tensor


class LatentCodec(Protocol):
    """Encodes videos of 4k + 1 frames to k + 1 latent frames, and back."""

    spatial_factor: int

    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes pixels (B, 3, F, H, W) in [-1, 1] to latents (B, C, f, h, w) of about unit standard deviation."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents to pixels."""


def load_codec(vae: str | None) -> LatentCodec:
    """Returns the patch codec, or with the path or name of an `AutoencoderKLWan`, that VAE."""
    if vae is None:
        return PatchCodec()
    from wan_vae_codec import WanVaeCodec  # it imports diffusers, which takes seconds

    return WanVaeCodec(vae)
