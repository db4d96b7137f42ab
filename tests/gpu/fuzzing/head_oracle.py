"""`qk_norm_rope` in float64, written from its formulas, and what rounding may do to each result.

n = x̂ · weight + bias over a head's channels or a token's, then every pair (a, b) of n is turned by its angle:
(a · cos - b · sin, a · sin + b · cos)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.gpu.fuzzing.judge import ROUNDOFF, Expected, Outcome, added_up, differentiate, wide_dtype

_ROUNDINGS = {"fp32_once": 1, "eager": 2, "at_end": 0}  # of the activations' dtype, before the rotation


class OtherRanks:
    """What the ranks beside this one add to its sums: of squares in forward, of dx̂ · x̂ in backward, where dx̂ is 1.

    Args:
        rest: Their channels of q and of k, (B, S, H, Dh).
        widths: Channels of q and of k over all ranks.
        eps: Of the norm.
    """

    def __init__(self, rest: list[Tensor], widths: tuple[int, int], eps: float) -> None:
        self.rest, self.widths, self.eps = rest, widths, eps
        self._inverses: list[Tensor] = []

    def again(self) -> OtherRanks:
        """The same ones before a first call."""
        return OtherRanks(self.rest, self.widths, self.eps)

    def __call__(self, mine: Tensor) -> Tensor:
        """The sum over all ranks, forward's first and then backward's."""
        rows = [x.double().flatten(2).flatten(0, 1) for x in self.rest]
        if self._inverses:
            others = [(x * inverse).sum(-1) for x, inverse in zip(rows, self._inverses, strict=True)]
            return mine + torch.cat(others).to(mine.dtype)
        total = mine + torch.cat([x.square().sum(-1) for x in rows]).to(mine.dtype)
        parts = zip(total.double().split([len(x) for x in rows]), self.widths, strict=True)
        self._inverses = [(part / width + self.eps).rsqrt()[:, None] for part, width in parts]
        return total


def expected(arguments: dict[str, Any], outcome: Outcome) -> list[Expected]:
    """Returns every result of an op beside the oracle's."""
    rows: list[Expected] = []
    for place, side in enumerate("qk"):
        rows += _of_side(arguments, outcome, side, place)
    return rows


def _of_side(arguments: dict[str, Any], outcome: Outcome, side: str, place: int) -> list[Expected]:
    x, cotangent = arguments[side], outcome.cotangents[place]
    parameters = ("weight", "bias", "proj_bias")
    names = [side, *(f"{side}_{p}" for p in parameters if f"{side}_{p}" in arguments)]
    trained = [name for name in names if name in outcome.gradients]
    ranks = arguments.get("sum_over_ranks")
    rest = None if ranks is None else ranks.rest[place].double()
    with torch.enable_grad():
        exact = {name: arguments[name].detach().double().requires_grad_() for name in names}
        t = {name.removeprefix(f"{side}_"): value for name, value in exact.items()} | {"x": exact[side]}
        y = _turned(_normed(t, arguments, rest), arguments, magnitudes=False)
        loss = y.new_zeros(()) if cotangent is None else (y * cotangent.double()).sum()
        if rest is not None:
            loss = loss + (rest.flatten(2) * _statistics(exact[side].flatten(2), arguments, rest)[1]).sum()
        gradients = differentiate(
            [loss], [None if cotangent is None else torch.ones_like(loss)], [exact[n] for n in trained]
        )
    plain = {name: value.detach() for name, value in t.items()}
    # A rounding costs no less of what is smaller than the smallest normal number.
    least = torch.finfo(x.dtype).tiny
    bounds = _magnitudes(plain, arguments, rest, None if cotangent is None else cotangent.double())
    wide = added_up(x.shape[0] * x.shape[1] * (x.shape[2] if arguments.get("per_head") else 1), wide_dtype(x.dtype))
    roundings = _ROUNDINGS[arguments["rounding"]] * ROUNDOFF[x.dtype]
    bound = wide * bounds["y"] + roundings * (bounds["turned"] + 2 * least * bounds["amplified"])
    rows = [Expected(f"{side} out", outcome.outputs[place], y, bound, x.dtype)]
    for name, truth in zip(trained, gradients, strict=True):
        like = arguments[name]
        exact_gradient = torch.zeros_like(like, dtype=torch.float64) if truth is None else truth
        magnitude = bounds["dx" if name == side else f"d{name.removeprefix(f'{side}_')}"]
        rows.append(Expected(f"d{name}", outcome.gradients[name], exact_gradient, wide * magnitude, like.dtype))
    return rows


def _statistics(x: Tensor, arguments: dict[str, Any], rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation over the last dimension of rows."""
    if arguments.get("norm", "rms") == "layer":
        mean = x.mean(-1, keepdim=True)
        return mean, ((x - mean).square().mean(-1, keepdim=True) + arguments["eps"]).rsqrt()
    squares, width = x.square().sum(-1, keepdim=True), x.shape[-1]
    if rest is not None:
        other = rest.flatten(2)
        squares, width = squares + other.square().sum(-1, keepdim=True), width + other.shape[-1]
    return torch.zeros_like(squares), (squares / width + arguments["eps"]).rsqrt()


def _normed(t: dict[str, Tensor], arguments: dict[str, Any], rest: Tensor | None) -> Tensor:
    x = t["x"]
    if "proj_bias" in t:  # it is in x already
        x = x + (t["proj_bias"] - t["proj_bias"].detach()).view(x.shape[2:])
    if arguments.get("norm", "rms") == "none":
        return x
    rows = x if arguments.get("per_head") else x.flatten(2)
    mean, inverse = _statistics(rows, arguments, rest)
    n = (rows - mean) * inverse
    n = n * t["weight"] if "weight" in t else n
    return (n + t["bias"] if "bias" in t else n).view(x.shape)


def _turned(n: Tensor, arguments: dict[str, Any], *, magnitudes: bool, back: bool = False) -> Tensor:
    """Rotated; or, of ``magnitudes``, the sums of those of the terms. ``back`` is the transposed rotation."""
    if arguments["rope"] is None:
        return n
    cos, sin = (table.double() for table in arguments["rope"])
    if cos.ndim == 2:
        cos, sin = (table[None, :, None] for table in (cos, sin))
    start, tokens, pairs = arguments["rope_start"], cos.shape[1], cos.shape[-1]
    sin = -sin if back else sin
    before, turning, after = n.split([start, tokens, n.shape[1] - start - tokens], dim=1)
    channels, rest = turning[..., : 2 * pairs], turning[..., 2 * pairs :]
    half = arguments["rope_layout"] == "half"
    a, b = channels.chunk(2, dim=-1) if half else (channels[..., 0::2], channels[..., 1::2])
    if magnitudes:
        cos, sin = cos.abs(), sin.abs()
        turned = (a * cos + b * sin, a * sin + b * cos)
    else:
        turned = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)
    return torch.cat((before, torch.cat((joined, rest), -1), after), dim=1)


def _magnitudes(
    t: dict[str, Tensor], arguments: dict[str, Any], rest: Tensor | None, cotangent: Tensor | None
) -> dict[str, Tensor]:
    """Sums of the magnitudes of the terms of the output and of every argument's gradient."""
    x, per_head = t["x"], arguments.get("per_head")
    norm = arguments.get("norm", "rms")
    dn = _turned((torch.zeros_like(x) if cotangent is None else cotangent).abs(), arguments, magnitudes=True)
    if norm == "none":
        y = _turned(x.abs(), arguments, magnitudes=True)
        return {
            "y": y,
            "turned": torch.zeros_like(y),
            "amplified": torch.zeros_like(y),
            "dx": dn,
            "dproj_bias": dn.sum((0, 1)).flatten(),
        }
    rows, dn = (v if per_head else v.flatten(2) for v in (x, dn))
    dims = tuple(range(rows.ndim - 1))
    _, inverse = _statistics(rows, arguments, rest)
    layer = norm == "layer"
    x_hat = (rows.abs() + rows.abs().mean(-1, keepdim=True) * layer) * inverse
    weight, bias = (t[name].abs() if name in t else default for name, default in (("weight", 1.0), ("bias", 0.0)))
    n = (x_hat * weight + bias).view(x.shape)
    dx_hat = dn * weight
    along = (dx_hat * x_hat).mean(-1, keepdim=True)
    if rest is not None:
        along = along + (rest.flatten(2) * inverse).abs().mean(-1, keepdim=True)
    dx = (inverse * (dx_hat + dx_hat.mean(-1, keepdim=True) * layer + x_hat * along)).view(x.shape)
    y = _turned(n, arguments, magnitudes=True)
    return {
        "y": y,
        "turned": y,
        "amplified": torch.ones_like(rows).mul(1 + weight).amax(-1, keepdim=True).view(*x.shape[:2], -1, 1),
        "dx": dx,
        "dweight": (dn * x_hat).sum(dims),
        "dbias": dn.sum(dims),
        "dproj_bias": dx.sum((0, 1)).flatten(),
    }
