"""DiT's block (facebookresearch/DiT, and everything built like it) with fused adaptive norms and gated residuals.

Such a block makes shift, scale and gate of its attention and of its MLP, in this order, from a condition per sample,
and modulates with ``x * (1 + scale) + shift`` in the modules' own dtype (Peebles & Xie, 2023, section 3.2, adaLN-Zero).
It is rounded after every operation, as there, so on the reference backend the forward gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import per_sample
from lightning_videoscale.injection.norms import LAYER_NORM
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream

_DIT_FORWARDS = {"e89c071547517142-b0cc6aa30aa80cf": "facebookresearch/DiT"}
_PARTS = (Part("norm1", LAYER_NORM), Part("norm2", LAYER_NORM))


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
        parts=_PARTS,
        objection=_missing_norm,
    )


def _forward(self: Any, x: Tensor, c: Tensor) -> Tensor:
    """The fused forward; parameters and result are those of DiT's ``DiTBlock.forward``."""
    attention, mlp = per_sample(self.adaLN_modulation(c), 2, x.shape[0])
    stream = ResidualStream(self, x, rounding="eager")
    stream.branch(self.attn, self.norm1, attention)
    stream.branch(self.mlp, self.norm2, mlp)
    return stream.end()


def _missing_norm(block: nn.Module) -> str | None:
    for part in _PARTS:
        if getattr(block, part.path, None) is None:
            return (
                f"there is no {part.path}, whose eps the fused forward reads: if it has no parameters, make it "
                "nn.LayerNorm(D, elementwise_affine=False), or write a FusedBlock with a forward of your own"
            )
    return None


FUSED_BLOCKS = {"models.DiTBlock": dit_block("models.DiTBlock", _DIT_FORWARDS)}
