"""diffusers' feed-forward with the tanh GELU (Wan, and other models) fused.

The bias gradient of its first Linear costs no pass of its own, and its activations are kept once for backward instead
of twice, before the GELU but not after.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.fused_block import FusedBlock, original_forward, unfused
from lightning_videoscale.injection.methods import difference
from lightning_videoscale.kernels import gelu_linear

_TRIED = "diffusers 0.37 to 0.42.1"
_FEED_FORWARD = "diffusers.models.attention.FeedForward"


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The fused forward; where somebody has changed a Linear meanwhile, the original, which calls whatever is there."""
    detach_bias = kwargs.pop("detach_bias", False)
    change = _changed(self)
    if args or kwargs or change is not None:
        original = original_forward(self) if change is None else unfused(self, change)
        unchanged: Tensor = original(hidden_states, *args, **kwargs)
        return unchanged
    first, second = self.net[0].proj, self.net[2]
    x = F.linear(hidden_states, first.weight, None if first.bias is None else first.bias.detach())
    bias = second.bias.detach() if detach_bias else second.bias
    return gelu_linear(x, second.weight, bias, x_bias=first.bias, backend=self.kernel_backend)


def _changed(feed_forward: Any) -> str | None:
    """Returns which part is not as diffusers makes it, since the fused forward calls none of them; None if all are."""
    if not _is_meant(feed_forward):
        return "net is not the tanh GELU, a Dropout and a Linear, with or without another Dropout"
    activation, dropout, second, *final = feed_forward.net
    changes = {
        "net.0.proj": changed_linear(activation.proj),
        "net.2": changed_linear(second),
        "net.0": changed(activation, "gelu"),
        "net.1": changed(dropout),
        "net.3": changed(final[0]) if final else None,
    }
    for name, change in changes.items():
        if change is not None:
            return f"{name} {change}"
    for name, each in (("net.1", dropout), *(("net.3", last) for last in final)):
        if each.p and each.training:
            return f"{name} drops {each.p} of the activations"
    return None


def _last_linear(feed_forward: Any) -> nn.Linear | str:
    if (change := _changed(feed_forward)) is not None:
        return change
    second = feed_forward.net[2]
    return "net.2 has no bias" if second.bias is None else second


def _is_meant(module: nn.Module) -> bool:
    """Whether it is a feed-forward around the tanh GELU; diffusers has one class for all its activations."""
    net: Any = getattr(module, "net", ())
    return (
        len(net) in (3, 4)
        and class_path(type(net[0])) == "diffusers.models.activations.GELU"
        and net[0].approximate == "tanh"
        and type(net[1]) is nn.Dropout
        and all(type(last) is nn.Dropout for last in net[3:])
    )


def _objection(module: nn.Module) -> str | None:
    activation: Any = module.get_submodule("net.0")
    if (change := _changed(module)) is not None:
        return change
    other = difference(type(activation), "forward", {"69a577f18913762d-5bfdf860044c": _TRIED})
    return None if other is None else f"the forward of net.0, its GELU, {other}"


FUSED_BLOCKS = {
    _FEED_FORWARD: FusedBlock(
        class_path=_FEED_FORWARD,
        forward=_forward,
        what="the GELU and the Linear after it: gelu_linear",
        known_forwards={"72e52ceb1469098a-844d5ce9644c": _TRIED},
        objection=_objection,
        is_meant=_is_meant,
        last_linear=_last_linear,
    )
}
