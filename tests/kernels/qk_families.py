"""What diffusers' attention processors hand to attention, and the arguments with which qk_norm_rope does the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models import attention_processor as generic
from diffusers.models.transformers import (
    transformer_cosmos,
    transformer_flux,
    transformer_hunyuan_video,
    transformer_ltx,
    transformer_mochi,
    transformer_wan,
)
from torch import Tensor, nn

from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope, rope_per_pair

HEADS, HEAD_DIM, BATCH, GRID, TEXT = 3, 16, 2, (2, 3, 4), 5
D, VIDEO = HEADS * HEAD_DIM, 2 * 3 * 4
Tables = tuple[Tensor, Tensor]


@dataclass
class Family:
    """One attention module of diffusers.

    Attributes:
        attention: The module.
        call: Runs it on hidden states and text.
        tokens: How many tokens its q and k have, text included where that is joined to them.
        options: Of qk_norm_rope.
    """

    attention: nn.Module
    call: Callable[[Tensor, Tensor], object]
    tokens: int
    options: dict[str, Any]


def wan() -> Family:
    attention = transformer_wan.WanAttention(D, HEADS, HEAD_DIM, eps=1e-6, processor=transformer_wan.WanAttnProcessor())
    rope = transformer_wan.WanRotaryPosEmbed(HEAD_DIM, (1, 1, 1), 32)(torch.empty(1, 1, *GRID))
    options = {"eps": 1e-6, "rope": rope_per_pair(*rope, "interleaved")}
    return Family(attention, lambda x, text: attention(x, rotary_emb=rope), VIDEO, options)


def wan_cross() -> Family:
    attention = transformer_wan.WanAttention(
        D, HEADS, HEAD_DIM, eps=1e-6, cross_attention_dim_head=HEAD_DIM, processor=transformer_wan.WanAttnProcessor()
    )
    return Family(attention, lambda x, text: attention(x, text), VIDEO, {"eps": 1e-6})


def ltx() -> Family:
    attention = transformer_ltx.LTXAttention(D, HEADS, HEADS, HEAD_DIM)
    frames, height, width = GRID
    embed = transformer_ltx.LTXVideoRotaryPosEmbed(D)
    rope = embed(torch.empty(BATCH, VIDEO, D), frames, height, width, (1 / 3, 32.0, 32.0))
    per_head = (table.unflatten(-1, (HEADS, HEAD_DIM)) for table in rope)
    options = {"eps": 1e-5, "rope": rope_per_pair(*per_head, "interleaved")}
    return Family(attention, lambda x, text: attention(x, image_rotary_emb=rope), VIDEO, options)


def hunyuan() -> Family:
    """A single-stream block: video and text tokens joined, the video's rotated."""
    processor = transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0()
    attention = generic.Attention(
        D, heads=HEADS, dim_head=HEAD_DIM, out_dim=D, bias=True, processor=processor, qk_norm="rms_norm", eps=1e-6,
        pre_only=True,
    )  # fmt: skip
    rope = transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed(1, 1, [4, 6, 6])(torch.empty(1, 1, *GRID))
    options = {"per_head": True, "eps": 1e-6, "rope": rope_per_pair(*rope, "interleaved"), "rounding": "eager"}
    return Family(attention, lambda x, text: attention(x, text, image_rotary_emb=rope), VIDEO + TEXT, options)


def flux() -> Family:
    attention = transformer_flux.FluxAttention(D, HEADS, HEAD_DIM, eps=1e-6)
    ids = torch.cartesian_prod(*(torch.arange(n) for n in GRID))
    rope = transformer_flux.FluxPosEmbed(10000, [4, 6, 6])(ids)
    options = {"per_head": True, "eps": 1e-6, "rope": rope_per_pair(*rope, "interleaved")}
    return Family(attention, lambda x, text: attention(x, image_rotary_emb=rope), VIDEO, options)


def cosmos() -> Family:
    processor = transformer_cosmos.CosmosAttnProcessor2_0()
    attention = generic.Attention(
        D, heads=HEADS, dim_head=HEAD_DIM, qk_norm="rms_norm", elementwise_affine=True, processor=processor
    )
    rope = transformer_cosmos.CosmosRotaryPosEmbed(HEAD_DIM, patch_size=(1, 1, 1))(torch.empty(1, 1, *GRID), fps=30)
    options = {
        "per_head": True, "eps": 1e-5, "rope": rope_per_pair(*rope, "half"), "rope_layout": "half", "rounding": "eager"
    }  # fmt: skip
    return Family(attention, lambda x, text: attention(x, image_rotary_emb=rope), VIDEO, options)


def cogvideox() -> Family:
    """Text tokens come first, and only the video's are rotated."""
    processor = generic.CogVideoXAttnProcessor2_0()
    attention = generic.Attention(
        D, heads=HEADS, dim_head=HEAD_DIM, qk_norm="layer_norm", eps=1e-6, bias=True, processor=processor
    )
    angle = torch.outer(torch.arange(VIDEO).float(), torch.linspace(1, 0.01, HEAD_DIM // 2)).repeat_interleave(2, -1)
    rope = angle.cos(), angle.sin()
    options = {
        "norm": "layer", "per_head": True, "eps": 1e-6, "rope": rope_per_pair(*rope, "interleaved"), "rope_start": TEXT
    }  # fmt: skip
    return Family(attention, lambda x, text: attention(x, text, image_rotary_emb=rope), VIDEO + TEXT, options)


def mochi() -> Family:
    attention = generic.MochiAttention(
        D, D, generic.MochiAttnProcessor2_0(), HEADS, HEAD_DIM, out_dim=D, out_context_dim=D, eps=1e-5
    )
    frequencies = torch.randn(3, HEADS, HEAD_DIM // 2, generator=torch.Generator().manual_seed(3))
    rope = transformer_mochi.MochiRoPE()(frequencies, *GRID, dtype=torch.float32)
    options = {"per_head": True, "eps": 1e-5, "rope": tuple(table[None] for table in rope)}
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    return Family(
        attention, lambda x, text: attention(x, text, attention_mask=mask, image_rotary_emb=rope), VIDEO, options
    )


FAMILIES = [wan, wan_cross, ltx, hunyuan, flux, cosmos, cogvideox, mochi]


@dataclass
class Seen:
    """The projections (B, S, D), and what of them reached attention (B, S, H, Dh), with autograd between the two."""

    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


def watch(family: Family, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Runs a family's attention on random hidden states, with random weights in its norms."""
    rng = torch.Generator().manual_seed(0)
    attention = family.attention
    for norm in (attention.norm_q, attention.norm_k):
        for parameter in norm.parameters():
            parameter.data += torch.randn(parameter.shape, generator=rng) / 2
    attention.to(dtype)
    before, calls = {}, []

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((query, key))
        return torch.zeros_like(query)

    modules = (transformer_wan, transformer_ltx, transformer_hunyuan_video, transformer_flux, transformer_cosmos)
    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "dispatch_attention_fn", attend)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        for name in ("to_q", "to_k"):
            getattr(attention, name).register_forward_hook(lambda m, i, out, name=name: before.update({name: out}))
        draw = [torch.randn(BATCH, n, D, generator=rng).to(dtype) for n in (VIDEO, TEXT)]
        family.call(*draw)

    def joined(side: int) -> Tensor:
        parts = [call[side] for call in calls]
        if len(calls) > 1 or parts[0].shape[1] == HEADS:  # (B, H, S, Dh), Mochi's one sample at a time
            parts = [part.transpose(1, 2) for part in parts]
        whole = torch.cat(parts)
        return whole[:, : before["to_q" if side == 0 else "to_k"].shape[1]]

    return Seen((before["to_q"], before["to_k"]), (joined(0), joined(1)))


def fused(q: Tensor, k: Tensor, *parameters: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """qk_norm_rope of projections."""
    return qk_norm_rope(q.unflatten(-1, (HEADS, HEAD_DIM)), k.unflatten(-1, (HEADS, HEAD_DIM)), *parameters, **options)


def one_rounding_in_each_of_a_pair(y: Tensor) -> Tensor:
    """By how much y may differ if both halves of a rotated pair were rounded the other way, and then their sum.

    Rotation turns one unit in the last place of each half, at most eps of its size, into at most √2 · eps of the
    pair's length in either; the result's own rounding adds eps of it.
    """
    pairs = y.unflatten(-1, (-1, 2)).double().norm(dim=-1, keepdim=True)
    return ((2**0.5 + 1) * torch.finfo(y.dtype).eps * pairs.expand(*pairs.shape[:-1], 2) + 1e-6).flatten(-2)
