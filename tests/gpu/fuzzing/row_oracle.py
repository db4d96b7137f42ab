"""The row operations in float64, written from their formulas, and what rounding may do to each result.

    h = residual + act(gate) · branch         rounded to the residual's dtype before it is normalised
    y = (x̂ · weight + bias) · (1 + scale) + shift,   x̂ = (h - mean) / √(variance + eps)

Gradients come from autograd. Beside each result stands the sum of the magnitudes of all terms that were added to get
it, X for x̂ and so on: rounding errors are multiples of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.fuzzing.judge import ROUNDOFF, Expected, Outcome, added_up, differentiate, wide_dtype

_EAGER_ROUNDINGS = {"h": 4, "y": 7}  # operand + table, its activation or 1 + it, every product and every sum
Step = Callable[[Tensor], Tensor]


def expected(arguments: dict[str, Any], outcome: Outcome, op: str) -> list[Expected]:
    """Returns every result of an op beside the oracle's."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    settings = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}
    with torch.enable_grad():
        exact = {n: x if n == "index" else x.detach().double().requires_grad_() for n, x in tensors.items()}
        names = {"gate_residual": ("h",), "norm_modulate": ("y",)}.get(op, ("h", "y"))
        got = dict(zip(names, outcome.outputs, strict=True))
        h = got["h"].detach().double() if op.startswith("gate") else None
        results = _forward(exact, settings, h, lambda x: x)
        cotangents64 = [None if c is None else c.double() for c in outcome.cotangents]
        leaves = [exact[name] for name in outcome.gradients]
        gradients = differentiate([results[n] for n in names], cotangents64, leaves)
    x = tensors.get("x", tensors.get("residual"))
    assert x is not None
    cotangents = {n: None if c is None else c.abs() for n, c in zip(names, cotangents64, strict=True)}
    # A rounding costs no less of what is smaller than the smallest normal number.
    least = torch.finfo(x.dtype).tiny
    magnitudes = _magnitudes({n: t.detach() for n, t in exact.items()}, settings, results, cotangents, least)
    wide = added_up(x.shape[0] * x.shape[1], wide_dtype(x.dtype))
    rounded = ROUNDOFF[x.dtype] if settings["rounding"] == "eager" and x.dtype.itemsize == 2 else 0.0
    plain: dict[str, Tensor] = {}
    if rounded:
        with torch.no_grad():
            plain = _forward(exact, settings, h, lambda value: value.to(x.dtype).double())
    rows = []
    for name in names:
        bound = wide * magnitudes[name] + _EAGER_ROUNDINGS[name] * rounded * magnitudes[f"steps to {name}"]
        as_plain = plain[f"exact {name}"].to(x.dtype) if plain else None
        rows.append(Expected(name, got[name], results[f"exact {name}"], bound, x.dtype, as_plain))
    for (name, mine), truth in zip(outcome.gradients.items(), gradients, strict=True):
        like = tensors[name]
        truth = torch.zeros_like(like, dtype=torch.float64) if truth is None else truth
        rows.append(Expected(f"d{name}", mine, truth, wide * magnitudes[f"d{name}"], like.dtype))
    return rows


def _forward(t: dict[str, Tensor], settings: dict[str, Any], h: Tensor | None, step: Step) -> dict[str, Tensor]:
    """The outputs; h, what the op itself has rounded it to, takes the place of the exact one in what follows."""
    x = t["x"] if "x" in t else t["residual"]
    results = {"h": x, "exact h": x}
    if "branch" in t:
        branch = t["branch"]
        if "branch_bias" in t:  # it is in the branch already
            branch = branch + (t["branch_bias"] - t["branch_bias"].detach())
        branch = _normed(branch, settings["eps"], layer=False) if settings["branch_norm"] else branch
        if "gate" in t:
            gate = step(_per_token(t, "gate", x))
            branch = branch * (step(gate.tanh()) if settings["gate_activation"] == "tanh" else gate)
        results["exact h"] = x + step(branch)
        x = results["exact h"]
        if h is not None:
            x = x + (h - x).detach()
        results["h"] = x
    if "norm" not in settings:
        return results
    layer = settings["norm"] == "layer"
    y = _normed(x, settings["eps"], layer=layer)
    y = (y if layer else step(y)) * t["weight"] if "weight" in t else y  # PyTorch's LayerNorm is one operation
    y = step(y + t["bias"] if "bias" in t else y)
    y = step(y * step(1 + step(_per_token(t, "scale", x)))) if "scale" in t else y
    y = y + step(_per_token(t, "shift", x)) if "shift" in t else y
    return results | {"y": y, "exact y": y}


def _normed(x: Tensor, eps: float, *, layer: bool) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if layer else x
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def _per_token(t: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """(B, S, D): an operand and its table, for every token."""
    table = t.get(f"{name}_table")
    return _spread(t[name] if table is None else t[name] + table, t.get("index"), x.shape[1])


def _spread(values: Tensor, index: Tensor | None, tokens: int) -> Tensor:
    values = values if index is None else values[index.long()]
    return values.repeat_interleave(tokens // max(1, values.shape[1]), dim=1)


def _magnitudes(
    t: dict[str, Tensor],
    settings: dict[str, Any],
    results: dict[str, Tensor],
    cotangents: dict[str, Tensor | None],
    least: float,
) -> dict[str, Tensor]:
    """Sums of the magnitudes of the terms of every output and of every argument's gradient, by name.

    Those of the steps to an output have ``least`` added at every step.
    """
    x = results["h"].detach()
    zeros = torch.zeros_like(x)
    total = {n: v.abs() for n, v in t.items() if n != "index"} | ({"index": t["index"]} if "index" in t else {})
    out = {"h": zeros, "steps to h": zeros}
    branch = activation = rstd = None
    if "branch" in t:
        branch = total["branch"]
        if settings["branch_norm"]:
            rstd = (t["branch"].square().mean(-1, keepdim=True) + settings["eps"]).rsqrt()
            branch = branch * rstd
        activation = _per_token(total, "gate", x) if "gate" in t else torch.ones_like(x)
        out["h"] = total["residual"] + activation * branch
        out["steps to h"] = out["h"] + least * (1 + activation + branch)
    dx, dy = cotangents.get("h"), cotangents.get("y")
    dx = zeros if dx is None else dx
    if "norm" in settings:
        layer = settings["norm"] == "layer"
        mean = x.mean(-1, keepdim=True) if layer else zeros[..., :1]
        inverse = ((x - mean).square().mean(-1, keepdim=True) + settings["eps"]).rsqrt()
        x_hat = (x.abs() + x.abs().mean(-1, keepdim=True) * layer) * inverse
        weight, bias = total.get("weight", 1.0), total.get("bias", 0.0)
        factor = 1 + _per_token(total, "scale", x) if "scale" in t else 1.0
        normed = x_hat * weight + bias
        out["y"] = normed * factor + (_per_token(total, "shift", x) if "shift" in t else 0.0)
        out["steps to y"] = out["y"] + least * (1 + normed + (1 + weight) * factor)
        if dy is not None:
            dn = dy * factor
            dx_hat = dn * weight
            along = (dx_hat * x_hat).mean(-1, keepdim=True)
            dx = dx + inverse * (dx_hat + dx_hat.mean(-1, keepdim=True) * layer + x_hat * along)
            out |= {"dweight": (dn * x_hat).sum((0, 1)), "dbias": dn.sum((0, 1))}
        dy = zeros if dy is None else dy
        _add_operand(out, t, "scale", dy * normed)
        _add_operand(out, t, "shift", dy)
        out.setdefault("dweight", zeros.sum((0, 1)))
        out.setdefault("dbias", zeros.sum((0, 1)))
    out["dx"] = out["dresidual"] = dx
    if branch is not None and activation is not None:
        _add_operand(out, t, "gate", dx * branch)
        dbranch = dx * activation
        if rstd is not None:
            dbranch = rstd * (dbranch + branch * (dbranch * branch).mean(-1, keepdim=True))
        out |= {"dbranch": dbranch, "dbranch_bias": dbranch.sum((0, 1))}
    return out


def _add_operand(out: dict[str, Tensor], t: dict[str, Tensor], name: str, per_token: Tensor) -> None:
    """The terms of an operand's gradient and of its table's, from those of every token."""
    if name not in t:
        return
    with torch.enable_grad():
        values = torch.zeros_like(t[name]).requires_grad_()
        spread = _spread(values, t.get("index"), per_token.shape[1])
        (out[f"d{name}"],) = torch.autograd.grad(spread, values, per_token)
    out[f"d{name}_table"] = per_token.sum((0, 1))
