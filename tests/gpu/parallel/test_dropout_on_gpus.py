"""Dropout over a split sequence, with the generators of the GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.parallel.test_dropout import check, train
from tests.distributed.pool import ProcessPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_masks_differ_and_generators_do_not(gpu_ranks: Callable[[int], ProcessPool]) -> None:
    plain = gpu_ranks(2).run(train, 2, 1, False, "gpu")
    check(plain)
    again = gpu_ranks(2).run(train, 2, 1, True, "gpu")
    for (states, masks, _), (states_again, masks_again, _) in zip(plain, again, strict=True):
        assert states_again == states
        for step in range(2):
            forward, backward = masks_again[8 * step : 8 * step + 4], masks_again[8 * step + 4 : 8 * step + 8]
            assert all(map(torch.equal, forward, masks[4 * step : 4 * step + 4]))
            assert all(map(torch.equal, forward, backward[2:] + backward[:2]))
