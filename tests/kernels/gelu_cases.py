"""A feed-forward's first half through `gelu`, beside the same in float64 PyTorch; for every backend and device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels import gelu
from lightning_videoscale.kernels.backend import BackendName

# Of the relative L2 error: outputs are rounded once, by at most half of epsilon.
ROUNDED_ONCE = {torch.float32: 1e-6, torch.bfloat16: 0.004, torch.float16: 0.0005, torch.float64: 1e-14}
ADDED_UP = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6, torch.float64: 1e-14}


def draw(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, spread: float = 2.0
) -> Tensor:
    """Normal numbers, the same for every device; at their spread both tails of the GELU occur."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(device, dtype)


def relative_error(got: Tensor, expected: Tensor, small: Tensor | None = None) -> float:
    """Of the L2 norm; where there are few elements, which may all lie in a tail, relative to that of ``small``."""
    got, expected = got.detach().double(), expected.detach().double()
    scale = expected.norm()
    if small is not None and expected.numel() < 1000:
        scale = torch.maximum(scale, small.detach().double().norm())
    return float((got - expected).norm() / scale)


def assert_close_to_float64(x: Tensor, dy: Tensor, backend: BackendName) -> None:
    """Checks y, dx and the sum of dx against PyTorch in float64.

    The sum's error is taken relative to the sum of dy's magnitudes, since it may itself be next to nothing.
    """
    bias = torch.zeros(x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device).requires_grad_()
    x = x.detach().requires_grad_()
    y = gelu(x, bias, backend=backend)
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    exact_x = x.detach().double().requires_grad_()
    exact_y = F.gelu(exact_x, approximate="tanh")
    (exact_dx,) = torch.autograd.grad(exact_y, exact_x, dy.double())
    rows = exact_dx.reshape(-1, x.shape[-1])
    assert y.dtype is dx.dtype is x.dtype and y.shape == dx.shape == x.shape
    assert y.is_contiguous() and dx.is_contiguous()
    assert dbias.dtype is bias.dtype
    for dtype in (None, bias.dtype):  # with the sums and without
        again = torch.ops.lightning_videoscale.gelu_backward(dy, x.detach(), dtype, True, backend)
        assert torch.equal(again[0], dx) and torch.equal(again[-1], y)
    assert relative_error(y, exact_y, x) < ROUNDED_ONCE[x.dtype]
    assert relative_error(dx, exact_dx, dy) < ROUNDED_ONCE[x.dtype]
    magnitudes = dy.double().reshape(rows.shape).abs().sum(0)
    error = (dbias.double() - rows.sum(0)).norm() / magnitudes.norm()
    assert error < ADDED_UP[x.dtype]


def feed_forward(h: Tensor, weight: Tensor, bias: Tensor | None, backend: BackendName) -> Tensor:
    """The use that `gelu` is made for."""
    return gelu(F.linear(h, weight, None if bias is None else bias.detach()), bias, backend=backend)
