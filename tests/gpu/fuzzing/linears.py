"""Cases of `gelu`, `gelu_linear` and `qkv_linear`, and the same in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels import gelu, gelu_linear, qkv_linear
from tests.gpu.fuzzing.judge import ROUNDOFF, Expected, Outcome, added_up, differentiate, wide_dtype
from tests.gpu.fuzzing.tensors import Tensors

OPS = {f.__name__: f for f in (gelu, gelu_linear, qkv_linear)}
_WIDTHS, _ODD_WIDTHS = (8, 64, 72, 512, 600, 1536, 5120, 8960), (1, 3, 24, 100, 1001)
# Roundings of the activations' dtype on the way: what a GELU or a matrix product passes to the next one, and the parts
# of a product that cuBLAS may add in half precision.
_ROUNDINGS = 4


@dataclass(frozen=True)
class LinearVariant:
    """What is compiled.

    Attributes:
        op: Its name.
        backend: That is asked for.
        width: F, or D of qkv_linear.
        x: Dtype of x.
        other: Of the bias of the Linear before (gelu), or of the weights.
        bias: Whether the Linear after has one.
        x_bias: Whether the Linear before has one.
    """

    op: str
    backend: str
    width: int
    x: torch.dtype
    other: torch.dtype
    bias: bool
    x_bias: bool

    @classmethod
    def draw(
        cls, rng: random.Random, op: str, backend: str, pair: tuple[torch.dtype, torch.dtype], elements: int
    ) -> LinearVariant:
        """Draws one whose activations and bias, or weights, have the two dtypes."""
        widths = _ODD_WIDTHS if backend != "cuda" and rng.random() < 0.25 else _WIDTHS
        width = rng.choice([w for w in widths if w * 4 <= elements])
        if op != "gelu" and rng.random() < 0.9:  # the others are refused
            pair = pair[0], pair[0]
        return cls(op, backend, width, *pair, bias=rng.random() < 0.7, x_bias=rng.random() < 0.7)


@dataclass(frozen=True)
class LinearCase:
    """A call.

    Attributes:
        seed: What it is drawn from.
        variant: What is compiled.
        shape: Of x, without the channels.
        outside: Channels of the Linears' outputs.
        scale: Of x.
        untrained: Share of the arguments that need no gradient.
    """

    seed: int
    variant: LinearVariant
    shape: tuple[int, ...]
    outside: tuple[int, int, int]
    scale: float
    untrained: float

    @classmethod
    def draw(cls, rng: random.Random, seed: int, variant: LinearVariant, elements: int) -> LinearCase:
        """Draws the sizes."""
        most = max(2, min(1500, elements // variant.width))
        n = min(most, rng.choice((1, 2, 5, 16, 129, rng.randint(1, most), rng.randint(1, most))))
        shape = rng.choice(((n,), (1, n), (2, max(1, n // 2)), (1, 2, max(1, n // 2))))
        outside = (8, 16, 40, 64, 128) if variant.width * 128 <= elements else (8,)
        q, k, v = (rng.choice(outside) for _ in range(3))
        return cls(seed, variant, shape, (q, k, v), rng.choice((0.3, 1.0, 4.0)), rng.choice((0.0, 0.0, 0.4)))

    @property
    def used(self) -> tuple[bool, ...]:
        """Which outputs reach the loss."""
        if self.variant.op != "qkv_linear":
            return (True,)
        return random.Random(self.seed).choice(((True, True, True), (True, False, True), (False, True, False)))

    @property
    def valid(self) -> bool:
        """Whether the documentation allows it: weights are of the activations' dtype."""
        return self.variant.op == "gelu" or self.variant.x == self.variant.other

    def arguments(self, draw: Tensors) -> dict[str, Any]:
        """The arguments by name; those of qkv_linear's tuples by their place."""
        v, rng = self.variant, random.Random(self.seed)
        drawn = {"x": draw.normal(*self.shape, v.width, dtype=v.x, scale=self.scale)}
        if v.op == "gelu" and v.x_bias:
            drawn["bias"] = draw.normal(v.width, dtype=v.other)
        if v.op == "gelu_linear" and v.x_bias:
            drawn["x_bias"] = draw.normal(v.width, dtype=v.x)
        for prefix, channels in zip(self._sides, self.outside, strict=False):
            scale = 1 / math.sqrt(v.width)
            drawn[f"{prefix}weight"] = draw.normal(channels, v.width, dtype=v.other, scale=scale)
            if v.bias:
                drawn[f"{prefix}bias"] = draw.normal(channels, dtype=v.other)
        trained = {n: x.detach().requires_grad_(rng.random() >= self.untrained) for n, x in drawn.items()}
        return trained if v.op == "qkv_linear" else trained | {"backend": v.backend}

    def call(self, **arguments: Any) -> Any:
        """Runs the op."""
        if self.variant.op != "qkv_linear":
            return OPS[self.variant.op](**arguments)
        weights, biases = ([arguments.get(f"{side}_{part}") for side in "qkv"] for part in ("weight", "bias"))
        return qkv_linear(arguments["x"], tuple(weights), tuple(biases))  # type: ignore[arg-type]

    def cotangents(self, draw: Tensors) -> tuple[Tensor, ...]:
        """Of all outputs."""
        v = self.variant
        widths = {"gelu": (v.width,), "gelu_linear": self.outside[:1], "qkv_linear": self.outside}[v.op]
        return tuple(draw.normal(*self.shape, width, dtype=v.x) for width in widths)

    def expected(self, arguments: dict[str, Any], outcome: Outcome) -> list[Expected]:
        """The results beside the oracle's."""
        v = self.variant
        wide, u = added_up(math.prod(self.shape) + v.width, wide_dtype(v.x)), _ROUNDINGS * ROUNDOFF[v.x]
        cotangents = [None if c is None else c.double() for c in outcome.cotangents]
        with torch.enable_grad():
            t = {n: x.detach().double().requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor)}
            outputs = self._outputs(t)
            gradients = differentiate(outputs, cotangents, [t[name] for name in outcome.gradients])
        of_outputs, of_gradients = self._magnitudes({n: x.detach().abs() for n, x in t.items()}, cotangents)
        through = 0.0 if v.op == "gelu" else u
        rows = [
            Expected("out", got, exact, (wide + through) * magnitude, v.x)
            for got, exact, magnitude in zip(outcome.outputs, outputs, of_outputs, strict=True)
        ]
        for (name, mine), truth in zip(outcome.gradients.items(), gradients, strict=True):
            like = arguments[name]
            truth = torch.zeros_like(like, dtype=torch.float64) if truth is None else truth
            only_added = name.endswith("bias") and name != self._before
            bound = (wide + (0.0 if only_added else through)) * of_gradients[name]
            rows.append(Expected(f"d{name}", mine, truth, bound, like.dtype))
        return rows

    @property
    def _before(self) -> str:
        """The name of the bias of the Linear before."""
        return "bias" if self.variant.op == "gelu" else "x_bias"

    @property
    def _sides(self) -> tuple[str, ...]:
        """What the names of the Linears' parameters begin with."""
        sides: dict[str, tuple[str, ...]] = {"gelu": (), "gelu_linear": ("",), "qkv_linear": ("q_", "k_", "v_")}
        return sides[self.variant.op]

    def _outputs(self, t: dict[str, Tensor]) -> list[Tensor]:
        x = t["x"]
        if self._before in t:  # it is in x already
            x = x + (t[self._before] - t[self._before].detach())
        x = x if self.variant.op == "qkv_linear" else F.gelu(x, approximate="tanh")
        return [F.linear(x, t[f"{side}weight"], t.get(f"{side}bias")) for side in self._sides] or [x]

    def _magnitudes(
        self, t: dict[str, Tensor], cotangents: list[Tensor | None]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Of the outputs and of the gradients by name, from magnitudes."""
        # The GELU's error in a tail is one of x; its slope's grows with x³. Rounding costs no less of what is smaller
        # than the smallest normal number.
        x = t["x"] + torch.finfo(self.variant.x).tiny
        outputs = [F.linear(x, t[f"{side}weight"], t.get(f"{side}bias")) for side in self._sides] or [x]
        gradients: dict[str, Tensor] = {}
        dx = torch.zeros_like(x)
        for side, output, cotangent in zip(self._sides or (None,), outputs, cotangents, strict=True):
            dy = torch.zeros_like(output) if cotangent is None else cotangent.abs()
            if side is None:
                dx = dy
                continue
            dx, flat = dx + dy @ t[f"{side}weight"] + torch.finfo(self.variant.x).tiny, dy.flatten(0, -2)
            gradients |= {f"{side}weight": flat.t() @ x.flatten(0, -2), f"{side}bias": flat.sum(0)}
        dx = dx if self.variant.op == "qkv_linear" else dx * (1 + x * (1 + 0.134 * x.square()))
        return outputs, gradients | {"x": dx, self._before: dx.flatten(0, -2).sum(0)}
