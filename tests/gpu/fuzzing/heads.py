"""Cases of `qk_norm_rope`, and of its ops over ranks with the other ranks' part played by the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope
from tests.gpu.fuzzing import head_oracle
from tests.gpu.fuzzing.heads_over_ranks import norm_rope_over_ranks
from tests.gpu.fuzzing.judge import Expected, Outcome, wide_dtype
from tests.gpu.fuzzing.tensors import Tensors

HEAD_OPS = {f.__name__: f for f in (qk_norm_rope, norm_rope_over_ranks)}


@dataclass(frozen=True)
class HeadVariant:
    """What is compiled.

    Attributes:
        op: Its name.
        backend: That is asked for.
        x: Dtype of q and k.
        affine: Of their weights; None where there are none.
        bias: Whether there are biases beside the weights.
        proj_bias: Dtype of the projections' biases, which are trained; None where there are none.
        norm: "none", "rms" or "layer".
        per_head: Whether it spans a head.
        heads: Of q and of k.
        head_dim: Dh.
        pairs: P; 0 rotates nothing.
        table: Dtype of cos and sin.
        table_heads: Whether they differ by head.
        table_stride: Elements from pair to pair.
        phases: Elements before the first pair of cos and of sin, with a stride of 2.
        layout: Of the pairs.
        rounding: Of the norm's result.
    """

    op: str
    backend: str
    x: torch.dtype
    affine: torch.dtype | None
    bias: bool
    proj_bias: torch.dtype | None
    norm: str
    per_head: bool
    heads: tuple[int, int]
    head_dim: int
    pairs: int
    table: torch.dtype
    table_heads: bool
    table_stride: int
    phases: tuple[int, int]
    layout: str
    rounding: str

    @classmethod
    def draw(
        cls, rng: random.Random, op: str, backend: str, pair: tuple[torch.dtype, torch.dtype], elements: int
    ) -> HeadVariant:
        """Draws one whose activations and weights have the two dtypes."""
        sharded, odd = op == "norm_rope_over_ranks", backend != "cuda" and rng.random() < 0.25
        head_dims = (2, 6, 12, 20, 48, 96) if odd else (8, 16, 32, 64, 128, 128)
        head_dim = rng.choice([d for d in head_dims if d * 8 <= elements])
        k_heads = rng.choice([h for h in (1, 2, 3, 6, 12, 24, 40) if h * head_dim * 8 <= elements])
        grouped = rng.random() < 0.3
        rotated = rng.choice((0, head_dim // 2, head_dim // 2, head_dim // 4))
        stride = rng.choice((1, 2))
        norm = "rms" if sharded else rng.choice(("none", "rms", "rms", "layer"))
        affine = pair[1] if norm != "none" and rng.random() < 0.8 else None
        if affine is not None and rng.random() < 0.9:  # the others are refused
            affine = affine if affine in (pair[0], wide_dtype(pair[0])) else rng.choice((pair[0], wide_dtype(pair[0])))
        return cls(
            op=op,
            backend=backend,
            x=pair[0],
            affine=affine,
            bias=affine is not None and not sharded and rng.random() < 0.5,
            proj_bias=rng.choice(pair) if not sharded and rng.random() < 0.4 else None,
            norm=norm,
            per_head=not sharded and rng.random() < 0.5,
            heads=(k_heads * rng.choice((2, 3)) if grouped and k_heads < 12 else k_heads, k_heads),
            head_dim=head_dim,
            pairs=rotated,
            table=rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64)),
            table_heads=not grouped and rng.random() < 0.3,
            table_stride=stride,
            phases=rng.choice(((0, 0), (0, 1), (1, 1))) if stride == 2 else (0, 0),
            layout=rng.choice(("interleaved", "half")),
            rounding=rng.choice(("fp32_once", "eager", "at_end")),
        )


@dataclass(frozen=True)
class HeadCase:
    """A call.

    Attributes:
        seed: What it is drawn from.
        variant: What is compiled.
        b: Samples.
        s: Tokens of q and of k.
        start: The first token that is rotated.
        rotated: How many are.
        table_batch: Whether cos and sin differ by sample.
        flat_table: Whether they are (T, P) where they differ by neither sample nor head.
        others: Channels of q and of k that other ranks have, per head of one's own.
        eps: Of the norm.
        scale: Of q and k.
        untrained: Share of the arguments that need no gradient.
    """

    seed: int
    variant: HeadVariant
    b: int
    s: tuple[int, int]
    start: int
    rotated: int
    table_batch: bool
    flat_table: bool
    others: int
    eps: float
    scale: float
    untrained: float

    @classmethod
    def draw(cls, rng: random.Random, seed: int, variant: HeadVariant, elements: int) -> HeadCase:
        """Draws the sizes."""
        b = rng.choice((1, 1, 2, 3))
        most = max(3, min(1000, elements // (variant.heads[0] * variant.head_dim * b)))
        s = min(most, rng.choice((1, 2, 3, 16, 33, 128, rng.randint(1, most), rng.randint(1, most))))
        start = rng.choice((0, rng.randrange(s)))
        return cls(
            seed=seed,
            variant=variant,
            b=b,
            s=(s, s if variant.pairs else min(most, rng.choice((s, 1, 77, 300)))),
            start=start,
            rotated=rng.choice((s - start, rng.randint(1, s - start))),
            table_batch=rng.random() < 0.3,
            flat_table=rng.random() < 0.5,
            others=rng.randint(1, 3),
            eps=rng.choice((1e-6, 1e-5, 1e-3)),
            scale=rng.choice((0.1, 1.0, 1.0, 4.0)),
            untrained=rng.choice((0.0, 0.0, 0.3)),
        )

    @property
    def used(self) -> tuple[bool, ...]:
        """Which outputs reach the loss."""
        return True, True

    @property
    def valid(self) -> bool:
        """Whether the documentation allows it: weights are of the activations' dtype or the wide one."""
        return self.variant.affine in (None, self.variant.x, wide_dtype(self.variant.x))

    def arguments(self, draw: Tensors) -> dict[str, Any]:
        """The arguments by name."""
        v, rng = self.variant, random.Random(self.seed)
        arguments: dict[str, Any] = {}
        for name, heads, s in zip("qk", v.heads, self.s, strict=True):
            width = v.head_dim if v.per_head else heads * v.head_dim
            arguments[name] = draw.normal(self.b, s, heads, v.head_dim, dtype=v.x, scale=self.scale)
            if v.affine is not None:
                arguments[f"{name}_weight"] = draw.normal(width, dtype=v.affine, offset=1.0)
                if v.bias:
                    arguments[f"{name}_bias"] = draw.normal(width, dtype=v.affine)
            if v.proj_bias is not None:
                arguments[f"{name}_proj_bias"] = draw.normal(heads * v.head_dim, dtype=v.proj_bias)
        for name, x in arguments.items():
            needed = name.endswith("proj_bias") or rng.random() >= self.untrained
            arguments[name] = x.detach().requires_grad_(needed)
        rope = {"rope": self._tables(draw), "rope_layout": v.layout, "rope_start": self.start if v.pairs else 0}
        arguments |= rope | {"rounding": v.rounding, "eps": self.eps, "backend": v.backend}
        if v.op == "qk_norm_rope":
            return arguments | {"norm": v.norm, "per_head": v.per_head}
        rest = [
            draw.normal(self.b, s, heads * self.others, v.head_dim, dtype=v.x, scale=2 * self.scale).detach()
            for heads, s in zip(v.heads, self.s, strict=True)
        ]
        widths = (1 + self.others) * v.head_dim * v.heads[0], (1 + self.others) * v.head_dim * v.heads[1]
        return arguments | {"widths": widths, "sum_over_ranks": head_oracle.OtherRanks(rest, widths, self.eps)}

    def call(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Runs the op."""
        if "sum_over_ranks" in arguments:
            arguments["sum_over_ranks"] = arguments["sum_over_ranks"].again()
        result: tuple[Tensor, Tensor] = HEAD_OPS[self.variant.op](**arguments)
        return result

    def cotangents(self, draw: Tensors) -> tuple[Tensor, ...]:
        """Of q and k."""
        v = self.variant
        sizes = zip(v.heads, self.s, strict=True)
        return tuple(draw.normal(self.b, s, heads, v.head_dim, dtype=v.x) for heads, s in sizes)

    def expected(self, arguments: dict[str, Any], outcome: Outcome) -> list[Expected]:
        """The results beside the oracle's."""
        return head_oracle.expected(arguments, outcome)

    def _tables(self, draw: Tensors) -> tuple[Tensor, Tensor] | None:
        v = self.variant
        if not v.pairs:
            return None
        flat = self.flat_table and not (self.table_batch or v.table_heads)
        extents = (self.b if self.table_batch else 1, self.rotated, v.heads[0] if v.table_heads else 1, v.pairs)
        angles = draw.angles(*((self.rotated, v.pairs) if flat else extents))
        tables = (angles.cos().to(v.table), angles.sin().to(v.table))
        cos, sin = (draw.placed_as(t, v.table_stride, p) for t, p in zip(tables, v.phases, strict=True))
        return cos, sin
