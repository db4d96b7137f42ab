"""Process pools, started when first asked for and shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.distributed.pool import ProcessPool

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    # With `=`: pytest would take a folder that stands alone for one of ours, before it knows this option.
    parser.addoption("--diffusers", metavar="FOLDER", help="--diffusers=checkout, whose tests tests/upstream runs")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], ProcessPool]]:
    """`ranks(4)` is a pool of four gloo processes."""
    pools: dict[int, ProcessPool] = {}

    def get(size: int) -> ProcessPool:
        return pools.setdefault(size, ProcessPool(size))

    yield get
    for pool in pools.values():
        pool.stop()
