"""diffusers' Wan block (Wan 2.1, 2.2, TI2V) with fused adaptive norms and gated residuals.

The residual stream and the norms are rounded where diffusers rounds them, so on the reference backend the forward gives
the same bits. The block's table and the timestep's part of the modulation are added inside the kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.bypassed import changed, unfused
from lightning_videoscale.injection.fused_block import FusedBlock, class_path
from lightning_videoscale.injection.methods import is_known
from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from lightning_videoscale.kernels.recompute import recomputed, run_norm

_FP32_LAYER_NORM = "diffusers.models.normalization.FP32LayerNorm"
_FP32_LAYER_NORM_FORWARDS = frozenset({"eeccdd19b7e90032"})  # diffusers 0.37 to 0.42
_WAN_BLOCK_FORWARDS = frozenset({"e3f915b69532cdf6"})  # diffusers 0.37 to 0.42


class GroupedModulation(NamedTuple):
    """The timestep's part of the modulation for tokens of which many have the same timestep.

    Attributes:
        values: (U, 6·D) or (U, 6, D), an entry for each different timestep.
        which: (B, S) integers: which entry each token has.
    """

    values: Tensor
    which: Tensor

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> GroupedModulation:
        """Splits the channels, the last dimension of what this stands for, as diffusers' model does before its blocks.

        Raises:
            ValueError: If ``dim`` is not that dimension.
        """
        if dim not in (-1, 2):
            raise ValueError(f"Only the channels, dimension 2 of (B, S, 6·D), can be split; got dimension {dim}.")
        return GroupedModulation(self.values.unflatten(1, sizes), self.which)

    def per_token(self) -> Tensor:
        """What this stands for, (B, S, …)."""
        return self.values[self.which]


class _Modulation(NamedTuple):
    """Shift, scale and gate of one sublayer: the timestep's part and the block's own, (D,).

    The timestep's part is (B, 1 or S, D), or (U, D) and which entry each token has, (B, S).
    """

    which: Tensor | None
    shift: Tensor
    scale: Tensor
    gate: Tensor
    shift_table: Tensor
    scale_table: Tensor
    gate_table: Tensor

    def of_norm(self) -> dict[str, Any]:
        """What `norm_modulate` takes of it."""
        return {
            "scale": self.scale,
            "shift": self.shift,
            "scale_table": self.scale_table,
            "shift_table": self.shift_table,
            "index": self.which,
        }

    def of_gate(self) -> dict[str, Any]:
        """What `gate_residual` takes of it."""
        return {"gate": self.gate, "gate_table": self.gate_table, "index": self.which}


def _modulations(table: Tensor, temb: Tensor | GroupedModulation, batch_size: int) -> tuple[_Modulation, _Modulation]:
    """Returns the modulation of the self-attention and of the feed-forward; nothing is added up here.

    Args:
        table: The block's own part, (1, 6, D).
        temb: The timestep's part: (B, 6, D) per sample or (B, S, 6, D) per token, or grouped; B may be 1 for all.
        batch_size: B.
    """
    parts: tuple[Tensor, ...]
    which = None
    if isinstance(temb, GroupedModulation):
        parts, which = temb.values.unbind(dim=1), temb.which
    else:
        per_token = temb.unsqueeze(1) if temb.ndim == 3 else temb
        parts = tuple(part.expand(batch_size, -1, -1) for part in per_token.unbind(dim=2))
    own = table.squeeze(0).unbind(0)
    return _Modulation(which, *parts[:3], *own[:3]), _Modulation(which, *parts[3:], *own[3:])


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | GroupedModulation,
    rotary_emb: Any,
) -> Tensor:
    """The fused forward; parameters and result are those of diffusers' ``WanTransformerBlock.forward``.

    h is what it is after the last residual, y the norm of that. y is recomputed from h, which is kept anyway.
    """
    if (change := _changed(self)) is not None:
        per_token = temb.per_token() if isinstance(temb, GroupedModulation) else temb
        unchanged: Tensor = unfused(self, change)(hidden_states, encoder_hidden_states, per_token, rotary_emb)
        return unchanged
    attention, feed_forward = _modulations(self.scale_shift_table, temb, hidden_states.shape[0])
    backend, recompute = self.kernel_backend, self.recompute_norms
    norm1 = attention.of_norm() | {"eps": self.norm1.eps, "backend": backend}
    norm3 = feed_forward.of_norm() | {"eps": self.norm3.eps, "backend": backend}

    hidden_states, y = run_norm(fork_norm_modulate, hidden_states, **norm1, recompute=recompute)
    with recomputed(y, partial(norm_modulate, hidden_states, **norm1), recompute=recompute):
        branch, bias = branch_and_bias(self.attn1, y, None, None, rotary_emb)

    gate = attention.of_gate() | {"branch_bias": bias}
    if isinstance(self.norm2, nn.Identity):
        h = gate_residual(hidden_states, branch, **gate, backend=backend)
        branch, bias = branch_and_bias(self.attn2, h, encoder_hidden_states, None, None)
    else:
        norm2 = {"weight": self.norm2.weight, "bias": self.norm2.bias, "eps": self.norm2.eps, "backend": backend}
        h, y = run_norm(gate_residual_norm_modulate, hidden_states, branch, **gate, **norm2, recompute=recompute)
        with recomputed(y, partial(norm_modulate, h, **norm2), recompute=recompute):
            branch, bias = branch_and_bias(self.attn2, y, encoder_hidden_states, None, None)

    h, y = run_norm(gate_residual_norm_modulate, h, branch, **norm3, branch_bias=bias, recompute=recompute)
    with recomputed(y, partial(norm_modulate, h, **norm3), recompute=recompute):
        branch, bias = branch_and_bias(self.ffn, y)
    return gate_residual(h, branch, **feed_forward.of_gate(), branch_bias=bias, backend=backend)


def _objection(block: nn.Module) -> str | None:
    """The fused forward computes the norms itself, hence they must be what it takes them for."""
    if (change := _changed(block)) is not None:
        return change
    known = is_known(type(block.get_submodule("norm1")), "forward", _FP32_LAYER_NORM_FORWARDS)
    return None if known else "norm1 is not diffusers' FP32LayerNorm as known here"


def _changed(block: Any) -> str | None:
    """Returns which norm is not as diffusers makes it, since the fused forward calls none; None if all are."""
    for name, norm, affine in (
        ("norm1", block.norm1, False),
        ("norm2", block.norm2, True),
        ("norm3", block.norm3, False),
    ):
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
        if affine and type(norm) is nn.Identity:
            continue
        if class_path(type(norm)) != _FP32_LAYER_NORM or (norm.weight is not None) is not affine:
            kind = "with" if affine else "without"
            return f"{name} is not diffusers' FP32LayerNorm {kind} an affine part, but {class_path(type(norm))}"
    return None


WAN_BLOCK = FusedBlock(
    class_path="diffusers.models.transformers.transformer_wan.WanTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate (2), gate_residual",
    known_forwards=_WAN_BLOCK_FORWARDS,
    objection=_objection,
    branches=("attn1", "attn2", "ffn"),
)
