"""Process pools joined by NCCL, a GPU for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.pool import ProcessPool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int], ProcessPool]]:
    """`gpu_ranks(4)` is a pool of four processes on four GPUs; skips the test where there are fewer."""
    pools: dict[int, ProcessPool] = {}

    def get(size: int) -> ProcessPool:
        if torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        return pools.setdefault(size, ProcessPool(size, "nccl", timeout=300.0))

    yield get
    for pool in pools.values():
        pool.stop()
