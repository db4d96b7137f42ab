"""What only a CUDA device can show: a clock that does not make the device wait."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_videoscale.callbacks.forward_clock import ForwardClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
