"""The fused forward of Wan's block: norms and gates.

The residual stream and the norms are rounded where diffusers rounds them, so on the reference backend it gives the same
bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.bypassed import changed, unfused
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.methods import difference
from lightning_videoscale.injection.modulation import GroupedModulation, modulations
from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from lightning_videoscale.kernels.recompute import recomputed, run_norm
from lightning_videoscale.models.wan.fused_attention import MODULE, TRIED

_FP32_LAYER_NORM = "diffusers.models.normalization.FP32LayerNorm"
_FP32_LAYER_NORM_FORWARDS = {"4b00d355c071d03e-bd14f7415": TRIED}


def _block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor | GroupedModulation,
    rotary_emb: Any,
) -> Tensor:
    """The fused forward; parameters and result are those of diffusers' ``WanTransformerBlock.forward``.

    h is what it is after the last residual, y the norm of that. y is recomputed from h, which is kept anyway.
    """
    if (change := _changed_block(self)) is not None:
        per_token = temb.per_token() if isinstance(temb, GroupedModulation) else temb
        unchanged: Tensor = unfused(self, change)(hidden_states, encoder_hidden_states, per_token, rotary_emb)
        return unchanged
    attention, feed_forward = modulations(self.scale_shift_table, temb, hidden_states.shape[0])
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


def _object_to_block(block: nn.Module) -> str | None:
    """The fused forward computes the norms itself, hence they must be what it takes them for."""
    if (change := _changed_block(block)) is not None:
        return change
    other = difference(type(block.get_submodule("norm1")), "forward", _FP32_LAYER_NORM_FORWARDS)
    return None if other is None else f"the forward of its norms {other}"


def _changed_block(block: Any) -> str | None:
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


FUSED_BLOCK = FusedBlock(
    class_path=f"{MODULE}.WanTransformerBlock",
    forward=_block_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate (2), gate_residual",
    known_forwards={"4da7200f9dd6c573-39b49f67eedbb96b67833e6f5b8584d1b44c": TRIED},
    objection=_object_to_block,
    branches=("attn1", "attn2", "ffn"),
)
