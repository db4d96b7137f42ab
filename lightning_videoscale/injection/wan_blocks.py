"""diffusers' Wan block (Wan 2.1, 2.2, TI2V) with fused adaptive norms.

The residual stream and the norms are rounded where diffusers rounds them, so the forward gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.injection.fused_block import FusedBlock, source_hash
from lightning_videoscale.kernels import norm_modulate

_FP32_LAYER_NORM_FORWARDS = frozenset({"eeccdd19b7e90032"})  # diffusers 0.37 to 0.42
_WAN_BLOCK_FORWARDS = frozenset({"e3f915b69532cdf6"})  # diffusers 0.37 to 0.42


def _wide(x: Tensor) -> Tensor:
    """In float32, or float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _modulation(table: Tensor, temb: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Returns shift, scale, gate of the self-attention and of the feed-forward, each (B, 1, D) or (B, S, D).

    Args:
        table: The block's own part, (1, 6, D).
        temb: The timestep's part: (B, 6, D) per sample or (B, S, 6, D) per token; B may be 1 for all samples.
        batch_size: B.
    """
    if temb.ndim == 3:
        temb = temb.unsqueeze(1)
    return tuple(part.expand(batch_size, -1, -1) for part in (table.unsqueeze(0) + _wide(temb)).unbind(dim=2))


def _forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Tensor:
    """The fused forward; parameters and result are those of diffusers' ``WanTransformerBlock.forward``."""
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = _modulation(
        self.scale_shift_table, temb, hidden_states.shape[0]
    )
    normed = norm_modulate(hidden_states, scale, shift, eps=self.norm1.eps)
    attended = self.attn1(normed, None, None, rotary_emb)
    hidden_states = (_wide(hidden_states) + attended * gate).type_as(hidden_states)

    normed = self.norm2(_wide(hidden_states)).type_as(hidden_states)
    hidden_states = hidden_states + self.attn2(normed, encoder_hidden_states, None, None)

    normed = norm_modulate(hidden_states, ffn_scale, ffn_shift, eps=self.norm3.eps)
    return (_wide(hidden_states) + _wide(self.ffn(normed)) * ffn_gate).type_as(hidden_states)


def _objection(block: nn.Module) -> str | None:
    """The fused forward computes norm1 and norm3 itself, hence they must be what it takes them for."""
    for name in ("norm1", "norm3"):
        norm: Any = block.get_submodule(name)
        if source_hash(type(norm).forward) not in _FP32_LAYER_NORM_FORWARDS or norm.weight is not None:
            return f"{name} is not diffusers' FP32LayerNorm without an affine part, as known here, but {norm}"
        if norm._forward_hooks or norm._forward_pre_hooks or "forward" in vars(norm):
            return f"{name} has forward hooks, which would not be called"
    return None


WAN_BLOCK = FusedBlock(
    class_path="diffusers.models.transformers.transformer_wan.WanTransformerBlock",
    forward=_forward,
    what="norm1, norm3: norm_modulate",
    known_forwards=_WAN_BLOCK_FORWARDS,
    objection=_objection,
)
