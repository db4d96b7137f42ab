"""How diffusers' video transformers are called: one function per class, since each takes text and place in its own way.

A function is given the transformer, latents (B, C, F, H, W), timesteps (B,) from 0 (data) to 1000 (noise) and the text,
and returns the prediction (B, C, F, H, W). To train another family, write one more and name it in `FAMILIES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import Tensor, nn

GUIDANCE = 6000.0  # 1000 times the scale that HunyuanVideo's guidance is distilled for
LTX_CELL = (
    8 / 24,
    32,
    32,
)  # seconds, rows and columns of pixels of a cell of LTX-Video's latents, at 24 frames a second


@dataclass(frozen=True)
class Text:
    """Captions, embedded.

    Attributes:
        embeddings: (B, L, D).
        mask: (B, L), True where there is a token.
    """

    embeddings: Tensor
    mask: Tensor

    @property
    def pooled(self) -> Tensor:
        """The mean (B, D) over the tokens of each caption."""
        weights = self.mask.to(self.embeddings.dtype).unsqueeze(-1)
        return (self.embeddings * weights).sum(1) / weights.sum(1)


def wan(transformer: nn.Module, noisy: Tensor, timestep: Tensor, text: Text) -> Tensor:
    return transformer(noisy, timestep, text.embeddings, return_dict=False)[0]


def hunyuan_video(transformer: nn.Module, noisy: Tensor, timestep: Tensor, text: Text) -> Tensor:
    """Text attends together with the video. The mean of a caption stands in for CLIP's pooled embedding."""
    return transformer(
        hidden_states=noisy,
        timestep=timestep,
        encoder_hidden_states=text.embeddings,
        encoder_attention_mask=text.mask.long(),
        pooled_projections=text.pooled,
        guidance=torch.full_like(timestep, GUIDANCE) if transformer.config.guidance_embeds else None,
        return_dict=False,
    )[0]


def ltx(transformer: nn.Module, noisy: Tensor, timestep: Tensor, text: Text) -> Tensor:
    """Takes tokens: the caller cuts patches and puts them together again."""
    patch = (transformer.config.patch_size_t, *[transformer.config.patch_size] * 2)
    frames, height, width = (side // size for side, size in zip(noisy.shape[2:], patch, strict=True))
    tokens = transformer(
        hidden_states=to_tokens(noisy, patch),
        encoder_hidden_states=text.embeddings,
        timestep=timestep,
        encoder_attention_mask=text.mask.long(),
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=LTX_CELL,
        return_dict=False,
    )[0]
    channels = tokens.shape[-1] // math.prod(patch)  # not those of the input, which may say more than is predicted
    return from_tokens(tokens, patch, torch.Size((len(noisy), channels, *noisy.shape[2:])))


def cogvideox(transformer: nn.Module, noisy: Tensor, timestep: Tensor, text: Text) -> Tensor:
    """Takes frames before channels, and the rotary tables of the video."""
    output: Tensor = transformer(
        hidden_states=noisy.transpose(1, 2),
        encoder_hidden_states=text.embeddings,
        timestep=timestep,
        image_rotary_emb=cogvideox_rotation(transformer.config, noisy),
        return_dict=False,
    )[0]
    return output.transpose(1, 2)


FAMILIES: dict[str, tuple[str, Callable[[nn.Module, Tensor, Tensor, Text], Tensor]]] = {
    "WanTransformer3DModel": ("text_dim", wan),
    "HunyuanVideoTransformer3DModel": ("text_embed_dim", hunyuan_video),
    "LTXVideoTransformer3DModel": ("caption_channels", ltx),
    "CogVideoXTransformer3DModel": ("text_embed_dim", cogvideox),
}
"""By class, what its configuration calls the size of a text embedding, and how it is called."""


def build(name: str, config: dict[str, Any]) -> nn.Module:
    """Returns a transformer of diffusers with random weights.

    Raises:
        ValueError: If nothing here says how that class is called.
    """
    if name not in FAMILIES:
        raise ValueError(f"transformer={name!r} is none of {', '.join(FAMILIES)}. Add it to {__name__}.FAMILIES.")
    return getattr(diffusers, name)(**config)


def text_dim(name: str, config: dict[str, Any]) -> int:
    """Size of the text embeddings that a transformer of that class and configuration takes."""
    return config[FAMILIES[name][0]]


def predict(name: str, transformer: nn.Module, noisy: Tensor, timestep: Tensor, text: Text) -> Tensor:
    """What a transformer of class ``name`` makes of noisy latents (B, C, F, H, W), in the same shape."""
    return FAMILIES[name][1](transformer, noisy, timestep, text)


def to_tokens(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Cuts latents (B, C, F, H, W) into tokens (B, S, C · patch)."""
    for dim, size in enumerate(patch, 2):
        latents = latents.unflatten(2 * dim - 2, (-1, size))
    return latents.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def from_tokens(tokens: Tensor, patch: tuple[int, int, int], shape: torch.Size) -> Tensor:
    """Puts latents of a shape together from their tokens."""
    grid = [side // size for side, size in zip(shape[2:], patch, strict=True)]
    patches = tokens.unflatten(1, grid).unflatten(4, (-1, *patch))
    return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def cogvideox_rotation(config: Any, latents: Tensor) -> tuple[Tensor, Tensor] | None:
    """Rotary tables (S, head dimension) of the cosine and the sine, as CogVideoX 1.0's pipeline makes them.

    Raises:
        ValueError: Of patches of several frames, as CogVideoX 1.5 has: a single frame, such as a still, is none.
    """
    if config.patch_size_t is not None:
        raise ValueError(f"patch_size_t={config.patch_size_t} of CogVideoX 1.5 is not written here: leave it out.")
    if not config.use_rotary_positional_embeddings:
        return None
    frames, *sides = latents.shape[2:]
    grid = tuple(side // config.patch_size for side in sides)
    base = config.sample_width // config.patch_size, config.sample_height // config.patch_size
    return get_3d_rotary_pos_embed(
        embed_dim=config.attention_head_dim,
        crops_coords=get_resize_crop_region_for_grid(grid, *base),
        grid_size=grid,
        temporal_size=frames,
        device=latents.device,
    )
