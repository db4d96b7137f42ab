"""Cases of the row operations: `norm_modulate`, `fork_norm_modulate`, `gate_residual` and both in one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from tests.gpu.fuzzing import row_oracle
from tests.gpu.fuzzing.judge import Expected, Outcome
from tests.gpu.fuzzing.tensors import Tensors

OPS = {f.__name__: f for f in (norm_modulate, fork_norm_modulate, gate_residual, gate_residual_norm_modulate)}
# Widths that CUDA takes, those of real models among them, and others.
_WIDTHS = (8, 16, 64, 72, 128, 136, 512, 1000, 1024, 1152, 1536, 1920, 2240, 3072, 5120, 5376)
_ODD_WIDTHS = (1, 2, 3, 5, 12, 100, 127, 129, 1001)


@dataclass(frozen=True)
class RowVariant:
    """What is compiled.

    Attributes:
        op: Its name.
        backend: That is asked for.
        d: D.
        x: Dtype of x or the residual.
        branch: Of the branch.
        values: Of gate, scale and shift.
        table: Of their tables.
        affine: Of weight and bias; None where the norm has none.
        branch_bias: Of the branch's bias, which is trained; None where there is none.
        norm: "layer" or "rms".
        gated: Whether there is a gate.
        modulation: "none", "scale" or "both".
        tables: Whether the operands have tables.
        map: "group" (several tokens share an entry), "token" or "index".
        settings: Activation, branch norm, rounding.
        frozen: Whether none of gate, scale, shift, tables, weight and bias is trained.
        used: Which outputs are.
    """

    op: str
    backend: str
    d: int
    x: torch.dtype
    branch: torch.dtype
    values: torch.dtype
    table: torch.dtype
    affine: torch.dtype | None
    branch_bias: torch.dtype | None
    norm: str
    gated: bool
    modulation: str
    tables: bool
    map: str
    settings: tuple[tuple[str, Any], ...]
    frozen: bool
    used: tuple[bool, ...]

    @classmethod
    def draw(
        cls, rng: random.Random, op: str, backend: str, pair: tuple[torch.dtype, torch.dtype], elements: int
    ) -> RowVariant:
        """Draws one whose activations, or activations and operands, have the two dtypes."""
        has_norm, has_branch = op != "gate_residual", op.startswith("gate")
        others = [torch.float32, torch.bfloat16, torch.float16]
        others += [torch.float64] if torch.float64 in pair else []
        if backend == "cuda" and has_branch and rng.random() < 0.7:  # the others are refused
            pair = pair[0], pair[0]
        odd = backend != "cuda" and rng.random() < 0.25
        settings: dict[str, Any] = {"rounding": rng.choice(("fp32_once", "eager"))}
        gated = has_branch and (not has_norm or rng.random() < 0.8)
        if has_branch:
            settings["gate_activation"] = rng.choice(("identity", "identity", "tanh"))
            settings["branch_norm"] = gated and rng.random() < 0.3
        norm = rng.choice(("layer", "rms"))
        both = op in ("fork_norm_modulate", "gate_residual_norm_modulate")
        return cls(
            op=op,
            backend=backend,
            d=rng.choice([d for d in (_ODD_WIDTHS if odd else _WIDTHS) if d * 4 <= elements]),
            x=pair[0],
            branch=pair[1] if has_branch else pair[0],
            values=rng.choice(others) if has_branch else pair[1],
            table=rng.choice(others),
            affine=rng.choice(others) if has_norm and rng.random() < 0.5 else None,
            branch_bias=rng.choice(others) if has_branch and rng.random() < 0.4 else None,
            norm=norm,
            gated=gated,
            modulation=rng.choice(("none", "scale", "both", "both")) if has_norm else "none",
            tables=rng.random() < 0.5,
            map=rng.choice(("group", "token", "index")),
            settings=tuple(settings.items()),
            frozen=rng.random() < 0.15,
            used=rng.choice([(True, True)] * 3 + [(True, False), (False, True)]) if both else (True,),
        )


@dataclass(frozen=True)
class RowCase:
    """A call.

    Attributes:
        seed: What it is drawn from.
        variant: What is compiled.
        b: Samples.
        s: Tokens of each.
        entries: R.
        groups: G, with an index.
        eps: Of the norm.
        scale: Of the activations.
        offset: Their mean.
        untrained: Share of the arguments that need no gradient.
    """

    seed: int
    variant: RowVariant
    b: int
    s: int
    entries: int
    groups: int
    eps: float
    scale: float
    offset: float
    untrained: float

    @classmethod
    def draw(cls, rng: random.Random, seed: int, variant: RowVariant, elements: int) -> RowCase:
        """Draws the sizes; a variant's map decides whether a single token may be."""
        b = rng.choice((1, 1, 2, 3))
        most = max(4, min(1500, elements // (variant.d * b)))
        s = rng.choice((1, 2, 3, 7, 16, 33, 64, 129, rng.randint(2, most), rng.randint(2, most)))
        s = 0 if rng.random() < 0.01 else min(s, most)
        if variant.map == "group":
            s = max(s, 2)
            divisors = [r for r in range(1, s) if s % r == 0]
        else:
            divisors = [s] if variant.map == "token" else [r for r in range(1, s + 1) if s % r == 0]
        return cls(
            seed=seed,
            variant=variant,
            b=b,
            s=s,
            entries=rng.choice(divisors) if divisors else 0,
            groups=rng.randint(1, 7),
            eps=rng.choice((1e-6, 1e-5, 1e-3)),
            scale=rng.choice((0.1, 1.0, 1.0, 4.0)),
            offset=rng.choice((0.0, 0.0, 1.0, 10.0)),
            untrained=rng.choice((0.0, 0.0, 0.3, 0.7)),
        )

    @property
    def used(self) -> tuple[bool, ...]:
        """Which outputs reach the loss."""
        return self.variant.used

    @property
    def valid(self) -> bool:
        """Whether the documentation allows it."""
        return True

    def call(self, **arguments: Any) -> Any:
        """Runs the op."""
        return OPS[self.variant.op](**arguments)

    def arguments(self, draw: Tensors) -> dict[str, Any]:
        """The arguments by name."""
        v, rng = self.variant, random.Random(self.seed)
        shape, d = (self.b, self.s, v.d), v.d
        has_branch, has_norm = v.op.startswith("gate"), v.op != "gate_residual"
        drawn = {
            "residual" if has_branch else "x": draw.normal(*shape, dtype=v.x, scale=self.scale, offset=self.offset)
        }
        if has_branch:
            drawn["branch"] = draw.normal(*shape, dtype=v.branch, scale=self.scale)
            if v.branch_bias is not None:
                drawn["branch_bias"] = draw.normal(d, dtype=v.branch_bias)
        entries = (self.groups, d) if v.map == "index" else (self.b, self.entries, d)
        scale, shift = v.modulation != "none", v.modulation == "both"
        for name, there in {"gate": v.gated, "scale": scale, "shift": shift}.items():
            if there:
                drawn[name] = draw.normal(*entries, dtype=v.values, scale=0.5)
                if v.tables:
                    drawn[f"{name}_table"] = draw.normal(d, dtype=v.table, scale=0.5)
        if has_norm and v.affine is not None:
            drawn["weight"] = draw.normal(d, dtype=v.affine, offset=1.0)
            if v.norm == "layer":
                drawn["bias"] = draw.normal(d, dtype=v.affine)
        arguments: dict[str, Any] = {}
        activations = {"x", "residual", "branch", "branch_bias"}
        frozen = drawn.keys() - activations if v.frozen else set()
        for name, x in drawn.items():
            needed = name == "branch_bias" or (name not in frozen and rng.random() >= self.untrained)
            arguments[name] = x.detach().requires_grad_(needed)
        if v.map == "index" and (v.gated or scale):
            dtype = rng.choice((torch.int32, torch.int64))
            arguments["index"] = draw.integers(self.groups, self.b, self.entries, dtype=dtype)
        arguments |= {"norm": v.norm} if has_norm else {}
        return arguments | dict(v.settings) | {"eps": self.eps, "backend": v.backend}

    def cotangents(self, draw: Tensors) -> tuple[Tensor, ...]:
        """Of all outputs, each in its dtype."""
        return tuple(draw.normal(self.b, self.s, self.variant.d, dtype=self.variant.x) for _ in self.variant.used)

    def expected(self, arguments: dict[str, Any], outcome: Outcome) -> list[Expected]:
        """The results beside the oracle's."""
        return row_oracle.expected(arguments, outcome, self.variant.op)
