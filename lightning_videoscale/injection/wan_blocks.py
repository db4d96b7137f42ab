"""diffusers' Wan block (Wan 2.1, 2.2, TI2V) with fused adaptive norms and gated residuals.

The residual stream and the norms are rounded where diffusers rounds them, so on the reference backend the forward gives
the same bits. The block's table and the timestep's part of the modulation are added inside the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_videoscale.injection.fused_block import FusedBlock, source_hash
from lightning_videoscale.kernels import gate_residual, gate_residual_norm_modulate, norm_modulate

_FP32_LAYER_NORM_FORWARDS = frozenset({"eeccdd19b7e90032"})  # diffusers 0.37 to 0.42
_WAN_BLOCK_FORWARDS = frozenset({"e3f915b69532cdf6"})  # diffusers 0.37 to 0.42


class _Modulation(NamedTuple):
    """Shift, scale and gate of one sublayer: the timestep's part, (B, 1 or S, D), and the block's own, (D,)."""

    shift: Tensor
    scale: Tensor
    gate: Tensor
    shift_table: Tensor
    scale_table: Tensor
    gate_table: Tensor


def _modulations(table: Tensor, temb: Tensor, batch_size: int) -> tuple[_Modulation, _Modulation]:
    """Returns the modulation of the self-attention and of the feed-forward; nothing is added up here.

    Args:
        table: The block's own part, (1, 6, D).
        temb: The timestep's part: (B, 6, D) per sample or (B, S, 6, D) per token; B may be 1 for all samples.
        batch_size: B.
    """
    if temb.ndim == 3:
        temb = temb.unsqueeze(1)
    parts = tuple(part.expand(batch_size, -1, -1) for part in temb.unbind(dim=2))
    own = table.squeeze(0).unbind(0)
    return _Modulation(*parts[:3], *own[:3]), _Modulation(*parts[3:], *own[3:])


def _forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Tensor:
    """The fused forward; parameters and result are those of diffusers' ``WanTransformerBlock.forward``."""
    attention, feed_forward = _modulations(self.scale_shift_table, temb, hidden_states.shape[0])
    backend = self.kernel_backend

    normed = norm_modulate(
        hidden_states,
        attention.scale,
        attention.shift,
        eps=self.norm1.eps,
        scale_table=attention.scale_table,
        shift_table=attention.shift_table,
        backend=backend,
    )
    attended = self.attn1(normed, None, None, rotary_emb)
    if isinstance(self.norm2, nn.Identity):
        hidden_states = normed = gate_residual(
            hidden_states, attended, attention.gate, gate_table=attention.gate_table, backend=backend
        )
    else:
        hidden_states, normed = gate_residual_norm_modulate(
            hidden_states,
            attended,
            attention.gate,
            weight=self.norm2.weight,
            bias=self.norm2.bias,
            eps=self.norm2.eps,
            gate_table=attention.gate_table,
            backend=backend,
        )
    crossed = self.attn2(normed, encoder_hidden_states, None, None)
    hidden_states, normed = gate_residual_norm_modulate(
        hidden_states,
        crossed,
        scale=feed_forward.scale,
        shift=feed_forward.shift,
        eps=self.norm3.eps,
        scale_table=feed_forward.scale_table,
        shift_table=feed_forward.shift_table,
        backend=backend,
    )
    return gate_residual(
        hidden_states, self.ffn(normed), feed_forward.gate, gate_table=feed_forward.gate_table, backend=backend
    )


def _objection(block: nn.Module) -> str | None:
    """The fused forward computes the norms itself, hence they must be what it takes them for."""
    for name, affine in (("norm1", False), ("norm2", True), ("norm3", False)):
        norm: Any = block.get_submodule(name)
        if name == "norm2" and type(norm) is nn.Identity:
            continue
        if source_hash(type(norm).forward) not in _FP32_LAYER_NORM_FORWARDS or (norm.weight is not None) is not affine:
            kind = "with" if affine else "without"
            return f"{name} is not diffusers' FP32LayerNorm {kind} an affine part, as known here, but {norm}"
        if norm._forward_hooks or norm._forward_pre_hooks or "forward" in vars(norm):
            return f"{name} has forward hooks, which would not be called"
    return None


WAN_BLOCK = FusedBlock(
    class_path="diffusers.models.transformers.transformer_wan.WanTransformerBlock",
    forward=_forward,
    what="norm_modulate, gate_residual_norm_modulate (2), gate_residual",
    known_forwards=_WAN_BLOCK_FORWARDS,
    objection=_objection,
)
