"""Blocks whose attention and feed-forward read the same norm, and have one projection behind both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.injection.branch_bias import changed_linear, without_bias_gradient
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.modulation import Modulation
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.kernels import gelu


def side_by_side(block: Any, modulation: Modulation, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs a diffusers block with ``norm``, ``proj_mlp``, ``act_mlp`` and ``proj_out`` on its stream (B, S, D)."""
    stream = ResidualStream(block, x, rounding="eager")
    y = stream.norm(block.norm.norm, modulation)
    with stream.recomputed(y):
        activated = _activated(block, y)
        attended = attend(y)
    del y
    both = torch.cat([attended, activated], dim=2)
    if changed_linear(block.proj_out) is None:
        stream.add(without_bias_gradient(block.proj_out, both), modulation, block.proj_out.bias)
    else:
        stream.add(block.proj_out(both), modulation)
    return stream.end()


def _activated(block: Any, y: Tensor) -> Tensor:
    """The feed-forward's first half."""
    linear, activation = block.proj_mlp, block.act_mlp
    if type(activation) is torch.nn.GELU and activation.approximate == "tanh" and changed(activation) is None:
        if changed_linear(linear) is None:
            return gelu(without_bias_gradient(linear, y), linear.bias, backend=block.kernel_backend)
        return gelu(linear(y), backend=block.kernel_backend)
    activated: Tensor = activation(linear(y))
    return activated
