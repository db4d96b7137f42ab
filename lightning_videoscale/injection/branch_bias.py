"""The bias gradient of a branch's last Linear, without a pass of its own over the branch's gradient.

The gated residual after a branch computes that gradient and can add it up as it does. So a fused block asks the module
at the branch's end to detach the bias of its last Linear, and gives that bias to `gate_residual`::

    branch, bias = branch_and_bias(self.attn, y)
    h = gate_residual(h, branch, gate, branch_bias=bias)

Parameters stay as they are, and so does the forward, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.bypassed import changed, has_hooks
from lightning_videoscale.injection.fused_block import fused_block_of


def branch_and_bias(module: nn.Module, *arguments: Any, **named: Any) -> tuple[Any, Tensor | None]:
    """Calls a module of the model.

    Returns:
        What it returns, and its last Linear's bias, (D,), whose gradient the caller must see to; None where the module
        does so itself: one that is not fused, or whose Linear somebody has put something else into (LoRA, hooks, a home
        elsewhere).
    """
    linear = last_linear(module)
    if isinstance(linear, str):
        return module(*arguments, **named), None
    return module(*arguments, **named, detach_bias=True), linear.bias


def last_linear(module: nn.Module) -> nn.Linear | str:
    """Returns the Linear whose bias a fused module can detach as things are now, or why there is none."""
    block = fused_block_of(module)
    if block is None or block.last_linear is None:
        return f"{class_path(type(module))} is not fused"
    if has_hooks(module):
        return "has hooks, which may use or change what it returns"
    return block.last_linear(module)


def output_linear(attn: Any) -> nn.Linear | str:
    """Returns the Linear of an attention's ``to_out``, as diffusers makes it, or why its bias stays as it is."""
    if attn.to_out is None:
        return "there is no to_out"
    projection, dropout = attn.to_out
    if (change := changed_linear(projection)) is not None:
        return f"to_out.0 {change}"
    if type(dropout) is not nn.Dropout or changed(dropout) is not None:
        return "to_out.1 is not a Dropout alone"
    if dropout.p and dropout.training:
        return f"to_out.1 drops {dropout.p} of the activations"
    return "to_out.0 has no bias" if projection.bias is None else projection


def without_bias_gradient(linear: Any, x: Tensor) -> Tensor:
    """A Linear that `changed_linear` lets pass, with a bias or without, whose gradient the caller sees to."""
    return F.linear(x, linear.weight, None if linear.bias is None else linear.bias.detach())


def changed_linear(linear: nn.Module) -> str | None:
    """Returns what calling ``linear`` does beyond ``F.linear`` with its own parameters; None: nothing.

    A Linear may have been given LoRA, parametrizations, a quantised weight, hooks or a home elsewhere.
    """
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return f"is no Linear of its own weight, but {class_path(type(linear))}"
    return changed(linear)
