"""A user's script that fails or is interrupted: every process ends, the first error is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.failures import detector
from lightning_videoscale.strategies.failures.stopping import EXIT_CODE
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.scripts import printed_in, start_forked
from tests.strategies.fsdp2.training import clips, trainer

SCRIPT = """
import signal, sys, time
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_videoscale import SequenceParallelDDPStrategy
from lightning_videoscale.parallel import Split, SplitPlan


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        print(f"step {batch_idx} on rank {self.global_rank}", flush=True)
        if batch_idx == 2 and str(self.global_rank) == sys.argv[1]:
            raise ValueError("the actual cause")
        time.sleep(60 if batch_idx == 2 and sys.argv[2:] == ["and_sleep"] else 0.1)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, ignore it
plan = SplitPlan({"": {"input": Split(1)}}, {}, {"": {0: Split(1)}}, lambda model, context: lambda: None)
pl.Trainer(
    strategy=SequenceParallelDDPStrategy(modules=["net"], plan=plan), accelerator="cpu", devices=2, max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
).fit(Module(), DataLoader(torch.randn(1000, 8, 4, generator=torch.Generator().manual_seed(0)), batch_size=2))
"""


def start(folder: Path, *args: str) -> BaseProcess:
    script = folder / "user_script.py"
    script.write_text(SCRIPT)
    return start_forked(folder, script, *args)


def alive(group: int) -> bool:
    """Whether any process of the group runs (zombies that nobody has waited for do not)."""
    listing = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(row.split()[0] == str(group) and "Z" not in row.split()[1] for row in listing.splitlines())


def wait_until_all_ended(folder: Path, process: BaseProcess, seconds: float) -> str:
    process.join(240)  # to import, to train and to end
    deadline = time.monotonic() + seconds
    while alive(group_of(process)):
        if time.monotonic() > deadline:
            os.killpg(group_of(process), signal.SIGKILL)
            raise AssertionError(f"processes left behind:\n{printed_in(folder)}")
        time.sleep(0.1)
    return "".join(printed_in(folder))


def group_of(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


class Ended(NamedTuple):
    """How a job ended: its exit status, what it printed, and the seconds since it was interrupted."""

    status: int | None
    output: str
    seconds: float = 0.0


def fail(folder: Path, *args: str) -> Ended:
    process = start(folder, *args)
    output = wait_until_all_ended(folder, process, seconds=5)
    return Ended(process.exitcode, output)


def interrupt(folder: Path, receiver: str, number: int = signal.SIGINT) -> Ended:
    process = start(folder, "nobody")
    while "step 3 on rank" not in printed_in(folder).stdout:
        assert process.is_alive()
        time.sleep(0.05)
    started = time.monotonic()
    (os.killpg if receiver == "group" else os.kill)(group_of(process), number)
    output = wait_until_all_ended(folder, process, seconds=5)
    return Ended(process.exitcode, output, time.monotonic() - started)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """Two jobs at a time, since each mostly waits for its second rank, which imports on one core."""
    cases: dict[str, tuple[Callable[..., Ended], *tuple[Any, ...]]] = {
        "a child": (fail, "1"),
        "the launcher": (fail, "0", "and_sleep"),
        "ctrl-c": (interrupt, "group"),
    }
    with ThreadPoolExecutor(2) as threads:
        yield {
            name: threads.submit(function, tmp_path_factory.mktemp("job"), *args)
            for name, (function, *args) in cases.items()
        }


def test_an_exception_of_a_child_ends_its_peer_that_waits_for_it(jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs["a child"].result()
    assert ended.status not in (0, None)
    assert "[rank1]: ValueError: the actual cause" in ended.output
    assert "The first error of the job was on rank 1: ValueError: the actual cause" in ended.output


def test_an_exception_of_the_launcher_ends_its_peer_that_computes(jobs: dict[str, Future[Ended]]) -> None:
    ended = jobs["the launcher"].result()
    assert ended.status not in (0, None)
    assert "[rank0]: ValueError: the actual cause" in ended.output


def test_ctrl_c_ends_all(jobs: dict[str, Future[Ended]]) -> None:
    check_interrupted(jobs["ctrl-c"].result())


def check_interrupted(ended: Ended) -> None:
    assert ended.seconds < 20
    assert ended.status == 1
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in ended.output


@pytest.mark.full
def test_an_interrupt_of_the_launcher_alone_ends_all(tmp_path: Path) -> None:
    check_interrupted(interrupt(tmp_path, "launcher"))


@pytest.mark.full
def test_sigterm_ends_what_lightning_has_launched(tmp_path: Path) -> None:
    ended = interrupt(tmp_path, "launcher", signal.SIGTERM)
    assert ended.seconds < 60
    assert ended.status == EXIT_CODE, ended.output
    assert "saved a checkpoint in" in ended.output
    assert "Error" not in ended.output


def train_after_a_failed_collective() -> list[str]:
    """Rank 1 stays away from a collective of an earlier job; then both train for longer than that one's timeout.

    Returns:
        What the watch said.
    """
    group = dist.new_group(timeout=timedelta(seconds=0.5), backend="gloo")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)

    class Slow(RectifiedFlow):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            time.sleep(0.4)
            return super().training_step(batch)

    said: list[str] = []
    with patch.object(detector._log, "error", said.append):
        trainer(SequenceParallelDDPStrategy(), max_steps=3).fit(Slow(), clips())
    return said


def test_who_stayed_away_from_an_earlier_job_is_not_missed(ranks: Callable[[int], ProcessPool]) -> None:
    assert ranks(2).run(train_after_a_failed_collective) == [[], []]
