"""A VAE of diffusers as an encoder of clips: pixels in, the latents that its model is trained on out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.cost.geometry import ModelGeometry

_PIXELS_AT_ONCE = 81 * 480 * 832


class DiffusersVae:
    """Encodes clips with a video VAE of diffusers.

    Latents are the mode of the posterior, normalised as the VAE's pipelines do it: by ``latents_mean`` and
    ``latents_std`` where it has them, else by ``shift_factor`` and ``scaling_factor``.

    Args:
        name: Folder of a saved VAE, or its name on the Hugging Face Hub. Weights are read from safetensors only.
        geometry: What the model makes of pixels; the VAE must agree with it.
        subfolder: Folder of the VAE within ``name``, such as ``vae``.
        device: Where to encode.
        dtype: Floating-point type to encode in.

    Raises:
        ModuleNotFoundError: If diffusers is not installed.
        OSError: If there is no such VAE.
        ValueError: If it is a model without an encoder.
    """

    def __init__(
        self,
        name: str,
        geometry: ModelGeometry,
        subfolder: str | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        try:
            from diffusers import AutoModel
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Encoding needs diffusers: pip install 'lightning-videoscale[diffusers]'."
            ) from error
        try:
            vae = AutoModel.from_pretrained(name, subfolder=subfolder, torch_dtype=dtype, use_safetensors=True)
        except OSError as error:
            raise OSError(
                f"No VAE at {name!r}, subfolder {subfolder!r}: name a folder or a model of the Hugging Face Hub, and "
                f"the subfolder that the VAE has in it, mostly 'vae' ({error})."
            ) from error
        if not hasattr(vae, "encode"):
            raise ValueError(f"{name} is a {type(vae).__name__}, which encodes nothing; name a VAE.")
        self.geometry = geometry
        self.name = f"{name}/{subfolder}" if subfolder else name
        self._vae: Any = vae.eval().requires_grad_(False).to(device)
        self._mean, self._std = (scale.to(device) for scale in _normalisation(vae))

    def to(self, device: torch.device) -> None:
        """Encodes there from now on."""
        self._vae.to(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes one clip, see `encode_batch`: (3, F, H, W) to (C, f, h, w), on the CPU."""
        return self.encode_batch(video[None])[0].cpu()

    @torch.no_grad()
    def encode_batch(self, videos: Tensor) -> Tensor:
        """Encodes clips of one shape, some at a time, so that many small ones take no more memory than a long one.

        Args:
            videos: (B, 3, F, H, W), uint8.

        Returns:
            (B, C, f, h, w), float32, on the VAE's device.

        Raises:
            ValueError: If the VAE makes another shape of them than the geometry says.
        """
        at_once = max(1, _PIXELS_AT_ONCE // videos[0, 0].numel())
        return torch.cat([self._encode(some) for some in videos.split(at_once)])

    def _encode(self, videos: Tensor) -> Tensor:
        pixels = videos.to(self._mean.device, non_blocking=True).to(self._vae.dtype) / 127.5 - 1
        latents: Tensor = self._vae.encode(pixels).latent_dist.mode().float()
        _, _, frames, height, width = videos.shape
        stride = self.geometry.spatial_stride
        expected = (self.geometry.latent_frames(frames), height // stride, width // stride)
        if tuple(latents.shape[2:]) != expected:
            raise ValueError(
                f"The VAE {self.name} makes latents of (f, h, w) = {tuple(latents.shape[2:])} of "
                f"{tuple(videos.shape[2:])} pixels, and the model's geometry says {expected}: name the model that it "
                "belongs to."
            )
        return (latents - self._mean) / self._std


def _normalisation(vae: Any) -> tuple[Tensor, Tensor]:
    config, buffers = vae.config, dict(vae.named_buffers())
    mean, std = (config.get(name) or buffers.get(name) for name in ("latents_mean", "latents_std"))
    if mean is not None and std is not None:
        scale = config.get("scaling_factor") or 1.0
        mean, std = (torch.as_tensor(values, dtype=torch.float32) for values in (mean, std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1) / scale
    scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
    return torch.full((1, 1, 1, 1, 1), shift), torch.full((1, 1, 1, 1, 1), 1.0 / scale)
