"""An oracle of qk_norm_rope in loops and complex numbers, hence unlike every backend; and random arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.kernels.head_types import RopeLayout


@dataclass(frozen=True)
class Case:
    """What to draw random arguments of."""

    batch: int = 2
    tokens: int = 5
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    norm: str = "rms"
    per_head: bool = False
    affine: bool = True
    layout: RopeLayout = "interleaved"
    pairs: int = 4  # 0 rotates nothing
    start: int = 0
    rotated: int = 5
    table_batch: bool = False
    table_heads: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def arguments(self, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Arguments:
        rng = torch.Generator().manual_seed(seed)
        wide = torch.promote_types(dtype, torch.float32)

        def draw(*size: int, dtype: torch.dtype = wide, shift: float = 0.0) -> Tensor:
            drawn = torch.randn(*size, generator=rng, dtype=torch.float64) + shift
            return drawn.to(device, dtype).requires_grad_()

        q = draw(self.batch, self.tokens, self.heads, self.head_dim, dtype=dtype)
        k = draw(self.batch, self.tokens, self.kv_heads, self.head_dim, dtype=dtype)
        parameters: list[Tensor | None] = [None] * 4
        if self.norm != "none" and self.affine:
            per_head = self.head_dim if self.per_head else None
            sizes = [per_head or heads * self.head_dim for heads in (self.heads, self.kv_heads)]
            parameters[:2] = [draw(size, shift=1.0) for size in sizes]
            if self.norm == "layer":
                parameters[2:] = [draw(size) for size in sizes]
        rope = None
        if self.pairs:
            size = (
                self.batch if self.table_batch else 1,
                self.rotated,
                self.heads if self.table_heads else 1,
                self.pairs,
            )
            angle = draw(*size).detach()
            rope = angle.cos(), angle.sin()
        options = {"norm": self.norm, "per_head": self.per_head, "rope": rope, "rope_layout": self.layout}
        options |= {"rope_start": self.start} | self.extra
        return Arguments([q, k, *parameters], options)


@dataclass(frozen=True)
class Arguments:
    """q, k, q_weight, k_weight, q_bias, k_bias; and the options."""

    tensors: list[Tensor | None]
    options: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors if t is not None]

    def double(self) -> Arguments:
        """The same values in float64, leaves again."""
        tensors = [None if t is None else t.detach().double().requires_grad_() for t in self.tensors]
        rope = self.options["rope"]
        wide = None if rope is None else tuple(table.double() for table in rope)
        return Arguments(tensors, self.options | {"rope": wide})


def oracle(q: Tensor, k: Tensor, *parameters: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """In the dtype of the arguments; differentiable by autograd."""
    q_weight, k_weight, q_bias, k_bias = parameters
    options.pop("rounding", None)  # the oracle rounds nothing
    return _side(q, q_weight, q_bias, **options), _side(k, k_weight, k_bias, **options)


def _side(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *,
    norm: str, per_head: bool, rope: tuple[Tensor, Tensor] | None, rope_layout: str, rope_start: int, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    shape = x.shape
    if norm != "none":
        rows = x if per_head else x.reshape(*shape[:2], -1)
        width = rows.shape[-1]
        centred = rows - rows.sum(-1, keepdim=True) / width if norm == "layer" else rows
        rows = centred / ((centred**2).sum(-1, keepdim=True) / width + eps) ** 0.5
        rows = rows if weight is None else rows * weight
        x = (rows if bias is None else rows + bias).reshape(shape)
    if rope is None:
        return x
    turn = torch.complex(*rope)
    if turn.ndim == 2:
        turn = turn[None, :, None]
    pairs, tokens = turn.shape[-1], turn.shape[1]
    result = []
    for token, heads in enumerate(x.unbind(1)):
        if rope_start <= token < rope_start + tokens:
            a, b = (heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2])
            if rope_layout != "interleaved":
                a, b = heads[..., :pairs], heads[..., pairs : 2 * pairs]
            turned = torch.complex(a, b) * turn[:, token - rope_start]
            parts = [turned.real, turned.imag]
            rotated = torch.stack(parts, -1).flatten(-2) if rope_layout == "interleaved" else torch.cat(parts, -1)
            heads = torch.cat([rotated, heads[..., 2 * pairs :]], -1)
        result.append(heads)
    return torch.stack(result, 1)


@st.composite
def cases(draw: Any) -> Case:
    """Everything that fits together, at small sizes."""
    tokens = draw(st.integers(1, 6))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([2, 4, 6, 8, 16]))
    start = draw(st.integers(0, tokens - 1))
    return Case(
        batch=draw(st.integers(1, 3)),
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=draw(st.sampled_from(["none", "rms", "layer"])),
        per_head=draw(st.booleans()),
        affine=draw(st.booleans()),
        layout=draw(st.sampled_from(["interleaved", "half"])),
        pairs=draw(st.integers(0, head_dim // 2)),
        start=start,
        rotated=draw(st.integers(1, tokens - start)),
        table_batch=draw(st.booleans()),
        table_heads=heads == kv_heads and draw(st.booleans()),
    )


FAMILIES = {
    "Wan": Case(),
    "LTX": Case(table_heads=True, table_batch=True),
    "LTX-2": Case(table_heads=True, table_batch=True, layout="half_fma"),
    "Flux": Case(per_head=True),
    "HunyuanVideo": Case(per_head=True, rotated=3, extra={"rounding": "eager"}),
    "Cosmos": Case(per_head=True, layout="half", extra={"rounding": "eager"}),
    "Wan under autocast": Case(extra={"rounding": "at_end"}),
    "halves, rounded at the end": Case(per_head=True, layout="half", extra={"rounding": "at_end"}),
    "CogVideoX": Case(norm="layer", per_head=True, start=2, rotated=3),
    "Mochi": Case(per_head=True, table_heads=True),
    "cross-attention": Case(pairs=0),
    "grouped queries, part of the channels": Case(kv_heads=2, per_head=True, pairs=3, layout="half"),
    "LayerNorm over all heads": Case(norm="layer", kv_heads=2),
    "rotation alone": Case(norm="none"),
}
