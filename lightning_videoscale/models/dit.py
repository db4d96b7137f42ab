"""DiT's block (facebookresearch/DiT, and everything built like it) with fused adaptive norms and gated residuals.

Such a block makes shift, scale and gate of its attention and of its MLP, in this order, from a condition per sample,
and modulates with ``x * (1 + scale) + shift`` in the modules' own dtype (Peebles & Xie, 2023, section 3.2, adaLN-Zero).
It is rounded after every operation, as there, so on the reference backend the forward gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.injection.bypassed import changed, unfused
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from lightning_videoscale.kernels.recompute import recomputed, run_norm

_DIT_FORWARDS = {"e89c071547517142-b0cc6aa30aa80cf": "facebookresearch/DiT"}


def dit_block(class_path: str, known_forwards: Collection[str] | None = None) -> FusedBlock:
    """Returns the replacement of a class of blocks built like DiT's.

    Its ``forward(self, x, c)`` is DiT's, with x (B, S, D) and c (B, D), and it has LayerNorms ``norm1`` and ``norm2``,
    any modules ``attn`` and ``mlp`` from (B, S, D) to the same, and ``adaLN_modulation`` from c to (B, 6·D).

    Args:
        class_path: ``"package.module.ClassName"``.
        known_forwards: As for `FusedBlock`; None if you know that the forward is DiT's.
    """
    return FusedBlock(
        class_path=class_path,
        forward=_forward,
        what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual",
        known_forwards=known_forwards,
        objection=_objection,
    )


def _forward(self: Any, x: Tensor, c: Tensor) -> Tensor:
    """The fused forward; parameters and result are those of DiT's ``DiTBlock.forward``."""
    if (change := _objection(self)) is not None:
        unchanged: Tensor = unfused(self, change)(x, c)
        return unchanged
    parts = self.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)
    (shift, scale, gate), (mlp_shift, mlp_scale, mlp_gate) = parts[:3], parts[3:]
    recompute, law = self.recompute_norms, {"rounding": "eager", "backend": self.kernel_backend}
    norm1 = {"scale": scale, "shift": shift, **_affine(self.norm1), **law}
    norm2 = {"scale": mlp_scale, "shift": mlp_shift, **_affine(self.norm2), **law}

    x, y = run_norm(fork_norm_modulate, x, **norm1, recompute=recompute)
    with recomputed(y, partial(norm_modulate, x, **norm1), recompute=recompute):
        branch = self.attn(y)
    h, y = run_norm(gate_residual_norm_modulate, x, branch, gate, **norm2, recompute=recompute)
    with recomputed(y, partial(norm_modulate, h, **norm2), recompute=recompute):
        branch = self.mlp(y)
    return gate_residual(h, branch, mlp_gate, **law)


def _affine(norm: nn.LayerNorm) -> dict[str, Any]:
    return {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps}


def _objection(block: nn.Module) -> str | None:
    """The fused forward computes the norms itself, hence they must be what it takes them for."""
    for name in ("norm1", "norm2"):
        norm: Any = getattr(block, name, None)
        if norm is None:
            return (
                f"there is no {name}, whose eps the fused forward reads: if it has no parameters, make it "
                "nn.LayerNorm(D, elementwise_affine=False), or write a FusedBlock with a forward of your own"
            )
        if (
            type(norm) is not nn.LayerNorm
            or len(norm.normalized_shape) != 1
            or (norm.weight is None) != (norm.bias is None)
        ):
            shape = getattr(norm, "normalized_shape", None)
            return f"{name} is not a LayerNorm over the channels, but {type(norm).__name__}({shape})"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return None


FUSED_BLOCKS = {"models.DiTBlock": dit_block("models.DiTBlock", _DIT_FORWARDS)}
