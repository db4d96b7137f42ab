"""Private kernels of attention beside products in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat import flash_attn
from lightning_videoscale.compat.torch import attention

KERNELS: dict[str, Any] = {
    "flash": (attention.flash, attention.flash_backward),
    "cudnn": (attention.cudnn, attention.cudnn_backward),
    "efficient": (attention.efficient, attention.efficient_backward),
    "flash_attn_2": (flash_attn.flash_attn_2, flash_attn.flash_attn_2_backward),
    "flash_attn_3": (flash_attn.flash_attn_3, flash_attn.flash_attn_3_backward),
    "flash_attn_4": (flash_attn.flash_attn_4, flash_attn.flash_attn_4_backward),
}
CASES = [("flash", False), ("cudnn", False), ("cudnn", True), ("efficient", False), ("efficient", True)]
SCALE = 0.3


def inputs(device: str, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, length, 64) for length in (37, keys, keys, 37)]
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def hiding(keys: int, device: str, dtype: torch.dtype) -> Tensor:
    """A bias that hides a tenth of the keys; its row starts on 16 elements."""
    row = torch.zeros(2, -(-keys // 16) * 16, dtype=dtype, device=device)[:, :keys]
    row[:, ::10] = -torch.inf
    return row[:, None, None]


def assert_as_products(kernel: str, device: str, dtype: torch.dtype, keys: int, bias: Tensor | None) -> None:
    """Compares with products in float64."""
    forward, backward = KERNELS.get(kernel, (attention.flash_cpu, attention.flash_cpu_backward))
    q, k, v, grad = inputs(device, keys, dtype)
    out, lse = forward(q, k, v, SCALE, bias)
    gradients = backward(grad, q, k, v, out, lse, SCALE, bias)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    logits = exact[0] @ exact[1].mT * SCALE + (0 if bias is None else bias.double())
    expected = logits.softmax(-1) @ exact[2]
    tolerance = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False}
    torch.testing.assert_close(out, expected.detach(), **tolerance)
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach(), **tolerance)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, exact, grad.double()), **tolerance)


def gradient_handed_over(x: Tensor) -> Tensor:
    """The gradient that reaches what computed ``x``, of one that lies with heads first."""
    received: list[Tensor] = []
    inner = x.requires_grad_() * 1
    inner.grad_fn.register_prehook(lambda gradients: received.append(gradients[0]))  # type: ignore[union-attr]
    attention.with_gradient_in_order(inner).backward(torch.ones(x.shape, device=x.device))
    return received[0]
