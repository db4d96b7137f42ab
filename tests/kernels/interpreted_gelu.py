"""Run by test_gelu.py in a process of its own, where Triton interprets its kernels on CPU tensors."""

from __future__ import annotations

import torch

from lightning_videoscale.kernels import gelu
from tests.kernels.gelu_cases import assert_close_to_float64, draw


def shapes() -> None:
    """Tiles and rows with and without a tail; not bf16, to which the interpreter truncates where GPUs round."""
    for n, f in ((1, 1), (3, 24), (4, 512), (47, 600), (20, 1536)):
        for dtype in (torch.float32, torch.float16):
            x, dy = draw(n, f, dtype=dtype), draw(n, f, dtype=dtype, seed=1)
            assert_close_to_float64(x, dy, "triton")
    strided = torch.stack([draw(9, 32)] * 2, dim=1)[:, 1]
    assert_close_to_float64(strided, draw(9, 32, seed=1), "triton")
    x = draw(3, 24)
    assert torch.equal(gelu(x, backend="triton"), gelu(x, draw(24), backend="triton"))


def repeats() -> None:
    x, bias = draw(61, 64), torch.zeros(64, requires_grad=True)
    runs = [torch.autograd.grad(gelu(x, bias, backend="triton").sum(), bias)[0] for _ in range(2)]
    assert torch.equal(*runs)


if __name__ == "__main__":
    shapes()
    repeats()
