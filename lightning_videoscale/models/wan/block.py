"""The fused forward of Wan's block: norms and gates.

The residual stream and the norms are rounded where diffusers rounds them, so on the reference backend it gives the same
bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import GroupedModulation, modulations
from lightning_videoscale.injection.norms import FP32_LAYER_NORM, IDENTITY, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.wan.fused_attention import MODULE, fused_attention


def three_branches(
    block: Any,
    x: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | GroupedModulation,
    rotary_emb: Any,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """What the blocks of Wan and of its kin do to their residual stream.

    Args:
        block: With Wan's parts.
        x: The stream, (B, S, D).
        encoder_hidden_states: For its cross-attention.
        temb: The timestep's part of the modulation, see `modulations`.
        rotary_emb: For its self-attention.
        attention_mask: Likewise.
    """
    attention, feed_forward = modulations(block.scale_shift_table, temb, x.shape[0])
    norm2 = None if isinstance(block.norm2, nn.Identity) else block.norm2
    stream = ResidualStream(block, x, rounding="fp32_once")
    stream.branch(block.attn1, block.norm1, attention, None, attention_mask, rotary_emb)
    stream.branch(block.attn2, norm2, None, encoder_hidden_states, None, None)
    stream.branch(block.ffn, block.norm3, feed_forward)
    return stream.end()


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | GroupedModulation,
    rotary_emb: Any,
) -> Tensor:
    return three_branches(self, hidden_states, encoder_hidden_states, temb, rotary_emb)


PARTS = (Part("norm1", FP32_LAYER_NORM), Part("norm2", FP32_LAYER_NORM, IDENTITY), Part("norm3", FP32_LAYER_NORM))
WHAT = "fork_norm_modulate, gate_residual_norm_modulate (2), gate_residual"
BRANCHES = ("attn1", "attn2", "ffn")

FUSED_BLOCK = FusedBlock(
    class_path=f"{MODULE}.WanTransformerBlock",
    forward=_forward,
    what=WHAT,
    known_forwards={"4da7200f9dd6c573-39b49f67eedbb96b67833e6f5b8584d1b44c": TRIED},
    parts=PARTS,
    branches=BRANCHES,
)


def copies(home: str) -> tuple[FusedBlock, FusedBlock]:
    """Returns the replacements of the block and the attention in a module of diffusers that has copies of Wan's."""
    block = replace(FUSED_BLOCK, class_path=f"{home}.WanTransformerBlock")
    return block, fused_attention(f"{home}.WanAttention")
