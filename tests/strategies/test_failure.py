"""A user's script that fails or is interrupted: every process ends, the first error is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, failure
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
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
plan = SplitPlan({"": {"input": Split(1)}}, {}, {"": 1}, lambda model, context: lambda: None)
pl.Trainer(
    strategy=SequenceParallelDDPStrategy(modules=["net"], plan=plan), accelerator="cpu", devices=2, max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
).fit(Module(), DataLoader(torch.randn(1000, 8, 4, generator=torch.Generator().manual_seed(0)), batch_size=2))
"""


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    script = folder / "user_script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a process group of its own, as a terminal gives it
    )


def alive(group: int) -> bool:
    """Whether any process of the group runs (zombies that nobody has waited for do not)."""
    listing = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(row.split()[0] == str(group) and "Z" not in row.split()[1] for row in listing.splitlines())


def wait_until_all_ended(process: subprocess.Popen[str], seconds: float) -> str:
    output, _ = process.communicate(timeout=60)
    deadline = time.monotonic() + seconds
    while alive(process.pid):
        assert time.monotonic() < deadline, f"processes left behind:\n{output}"
        time.sleep(0.1)
    return output


@pytest.mark.parametrize(
    ("failing_rank", "other"),
    [("1", ()), ("0", ("and_sleep",))],
    ids=["a_child_while_its_peer_waits_for_it", "the_launcher_while_its_peer_computes"],
)
def test_an_exception_on_one_rank_ends_all(tmp_path: Path, failing_rank: str, other: tuple[str, ...]) -> None:
    process = start(tmp_path, failing_rank, *other)
    output = wait_until_all_ended(process, seconds=5)
    assert process.returncode != 0
    assert f"[rank{failing_rank}]: ValueError: the actual cause" in output
    if failing_rank == "1":
        assert "The first error of the job was on rank 1: ValueError: the actual cause" in output


@pytest.mark.parametrize("receiver", ["group", "launcher"])
def test_ctrl_c_ends_all(tmp_path: Path, receiver: str) -> None:
    process = start(tmp_path, "nobody")
    assert process.stdout is not None
    while "step 3 on rank" not in process.stdout.readline():
        assert process.poll() is None
    started = time.monotonic()
    if receiver == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output = wait_until_all_ended(process, seconds=5)
    assert time.monotonic() - started < 20
    assert process.returncode == 1
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in output


def train_after_a_failed_collective() -> list[str]:
    """Rank 1 stays away from a collective of an earlier job; then both train for longer than that one's timeout.

    Returns:
        What the watch said.
    """
    group = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)

    class Slow(RectifiedFlow):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            time.sleep(1)
            return super().training_step(batch)

    said: list[str] = []
    with patch.object(failure._log, "error", said.append):
        trainer(SequenceParallelDDPStrategy(), max_steps=3).fit(Slow(), clips())
    return said


def test_who_stayed_away_from_an_earlier_job_is_not_missed(ranks: Callable[[int], ProcessPool]) -> None:
    assert ranks(2).run(train_after_a_failed_collective) == [[], []]
