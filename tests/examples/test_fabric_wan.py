"""A loop of one's own with Fabric trains on two ranks that share sequences as on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fabric_wan import main

from tests.distributed.pool import ProcessPool


def test_two_ranks_train_as_one(ranks: Callable[[int], ProcessPool]) -> None:
    alone = main(["--devices", "1"])
    for losses in ranks(2).run(main, ["--devices", "2"]):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]
