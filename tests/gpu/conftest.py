"""Process pools joined by NCCL, a GPU for each rank, and the record of what passed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.distributed.pool import ProcessPool
from tests.gpu.recording import Recording


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share-gpu", action="store_true", help="several ranks on one GPU, by gloo, where a test can")
    parser.addoption("--record", metavar="COMMIT", help="write last_result.json: what passed at this commit (or HEAD)")


def pytest_configure(config: pytest.Config) -> None:
    commit = config.getoption("--record", default=None)  # not known when this folder was not named
    if commit is None or hasattr(config, "workerinput"):  # of pytest-xdist's processes the first one counts
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("There is no GPU here, so every test would be skipped.")
    if config.option.keyword or any("::" in argument for argument in config.args):
        raise pytest.UsageError("Whole files are recorded: run without -k and without names of tests.")
    config.pluginmanager.register(Recording(commit))


class WithoutGPU(pytest.Module):
    """A file of tests where there is no GPU: it is imported, and skipped as a whole, not case by case."""

    def collect(self) -> NoReturn:
        assert self.obj is not None
        pytest.skip("needs a CUDA device")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else WithoutGPU.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def no_garbage_on_gpus() -> Iterator[None]:
    """Frees models in cycles after each test, where other tests do after each file: the next may need their memory."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def ranks_on_gpus(
    request: pytest.FixtureRequest, gpu_ranks: Callable[[int], ProcessPool]
) -> Iterator[Callable[[int], ProcessPool]]:
    """As `gpu_ranks`; with ``--share-gpu`` all processes are on one GPU, joined by gloo."""
    if not request.config.getoption("--share-gpu"):
        yield gpu_ranks
        return
    pools: dict[int, ProcessPool] = {}
    yield lambda size: pools.setdefault(size, ProcessPool(size, "gloo", timeout=300.0, share_gpu=True))
    for pool in pools.values():
        pool.stop()


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


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
