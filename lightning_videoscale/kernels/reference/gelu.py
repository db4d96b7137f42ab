"""`gelu` in plain PyTorch; interface, see `GeluBackend`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels.gelu import GeluVariant


def limit(variant: GeluVariant, device: int) -> str | None:
    """See `GeluBackend.limit`: runs on everything."""
    return None


def forward(x: Tensor) -> Tensor:
    """See `GeluBackend.forward`; the bits of eager code on a contiguous x, whose order of operations differs on CPU."""
    return F.gelu(x.contiguous(), approximate="tanh")


def backward(dy: Tensor, x: Tensor, *, sums: bool, again: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `GeluBackend.backward`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.contiguous().to(wide), x.contiguous().to(wide), approximate="tanh")
    return dx.to(x.dtype), dx.sum(dim=0) if sums else None, forward(x) if again else None
