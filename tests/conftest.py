"""Process pools, started when first asked for and shared by all tests of a file; and the order of files."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.distributed.pool import ProcessPool

settings.register_profile("repeatable", derandomize=True, deadline=None)  # other work runs on the machine
settings.load_profile("repeatable")
# Hypothesis also tries the numbers in what was imported so far, which differs with the tests that ran before.
assert hasattr(providers, "_get_local_constants"), "hypothesis has renamed where it takes the numbers of modules from"
providers._get_local_constants = lambda: providers._local_constants

LONGEST = (
    "test_failures_in_training.py",
    "test_wan_parity.py",
    "test_checkpoints.py",
    "test_compiled_schedules.py",
    "test_parity.py",
    "test_train.py",
    "test_schedules.py",
    "test_hidden_exchange.py",
    "test_balances.py",
    "test_imports.py",
    "test_qk_norm_rope_triton.py",
    "test_triton_rows.py",
    "test_kept_for_backward.py",
    "test_compiled_families.py",
    "test_two_experts.py",
    "test_failure.py",
)
"""Files that run first where several run at a time: one that is left for last would run alone."""

QUIET = {
    "tests/callbacks": (
        "ignore:The 'train_dataloader' does not have many workers",
        "ignore:The number of training batches",
        "ignore:GPU available but not used",
    ),
    "tests/data": (
        "ignore:The number of training batches",
        "ignore:You defined a `validation_step` but have no `val_dataloader`",
    ),
}
"""By folder, advice of Lightning's that says nothing about its tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # With `=`: pytest would take a folder that stands alone for one of ours, before it knows this option.
    parser.addoption("--diffusers", metavar="FOLDER", help="--diffusers=checkout, whose tests tests/upstream runs")
    parser.addoption("--videos", metavar="FOLDER", help="--videos=folder of real clips, which are decoded, too")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for garbage only between test files, and there in what tests make: little of the rest ever is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, messages in QUIET.items():
            if folder in item.path.as_posix():
                for message in messages:
                    item.add_marker(pytest.mark.filterwarnings(message))
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture(autouse=True)
def no_place_among_ranks() -> Iterator[None]:
    """Takes back what a Trainer in the test's own process says of ranks, and its group.

    Processes that later tests start would hear of the former, and tests in this process find the latter.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")
    before, is_joined = {name: os.environ.get(name) for name in names}, dist.is_initialized()
    yield
    if dist.is_initialized() and not is_joined:
        dist.destroy_process_group()  # Lightning leaves it to the end of the process
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Forgets what a test compiled: the ninth module that a process compiles for itself is an error of torch."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> Iterator[None]:
    """Frees what the tests of a file left in cycles: Trainers, with their models."""
    yield
    gc.collect()


@pytest.fixture
def collector() -> Iterator[None]:
    """Python's garbage collector as a user has it: on, and with nothing frozen."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.disable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], ProcessPool]]:
    """`ranks(4)` is a pool of four gloo processes.

    It ends with the file: it starts in a moment, and processes that gloo has connected are never quite idle.
    """
    pools: dict[int, ProcessPool] = {}

    def get(size: int) -> ProcessPool:
        return pools.setdefault(size, ProcessPool(size))

    yield get
    for pool in pools.values():
        pool.stop()
