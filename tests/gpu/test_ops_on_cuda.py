"""What only a CUDA device can show: the op's bits there, and a clock that does not make the device wait."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_videoscale.callbacks.forward_clock import ForwardClock
from lightning_videoscale.kernels import norm_modulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_modulate_is_bitwise_eager(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 4096, 1536, device="cuda") * 2).to(dtype).requires_grad_()
    scale, shift = (torch.randn(2, rows, 1536, device="cuda", requires_grad=True) for _ in range(2))
    eager = (torch.nn.functional.layer_norm(x.float(), (1536,), eps=1e-6) * (1 + scale) + shift).type_as(x)
    fused = norm_modulate(x, scale, shift, eps=1e-6)
    assert torch.equal(fused, eager)

    dy = torch.randn_like(eager)
    theirs = torch.autograd.grad(eager, (x, scale, shift), dy)
    ours = torch.autograd.grad(fused, (x, scale, shift), dy)
    for gradient, expected in zip(ours, theirs, strict=True):
        bound = 1e-6 if gradient.dtype is torch.float32 else 1e-3
        assert (gradient.double() - expected.double()).norm() <= bound * expected.double().norm()


def test_opcheck() -> None:
    x, scale, shift = (torch.randn(2, 3, 8, device="cuda", requires_grad=True) for _ in range(3))
    torch.library.opcheck(torch.ops.lightning_videoscale.norm_modulate.default, (x, scale, shift, None, None, 1e-6))


def test_the_clock_times_the_device_without_stopping_it() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    clock = ForwardClock(torch.device("cuda"))
    begin = time.perf_counter()
    for products in (10, 100):
        clock.start()
        for _ in range(products):
            a @ a
        clock.stop()
    enqueued = time.perf_counter() - begin
    short, long = clock.drain()
    assert 5 < long / short < 20
    assert enqueued < long  # the host was done before the device
