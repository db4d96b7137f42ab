"""A job of a few processes that may end in any way: what they print and how they end is what a test looks at."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.forking import forking


class Job:
    """Runs ``function(*args)`` in processes of its own, forked from one that has all modules imported.

    Args:
        folder: Takes what each rank prints.
        ranks: Number of processes.
        function: At the top level of a module.
        *args: Its arguments.
        environment: Set in all of them, instead of what torchrun sets. In a value, ``{rank}`` is the rank; where two
            ranks are a node, ``{node}`` and ``{local}`` are its place.
        backend: ``"gloo"``, or ``"nccl"`` with a GPU for each rank; CUDA does not live through a fork.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        backend: str = "gloo",
    ) -> None:
        context = forking() if backend == "gloo" else get_context("spawn")
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        # Ranks meet in a file: of a port that is free now, nobody knows whether it is when the ranks have started.
        meeting = str(Path(tempfile.mkdtemp(prefix="ranks-")) / "store")
        work = partial(function, *args)
        self.processes = [
            context.Process(target=_work, args=(self.logs[rank], backend, meeting, rank, ranks, environment, work))
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()
        self.started = time.monotonic()

    def wait(self, seconds: float) -> list[int | None]:
        """Returns the exit codes once all have ended; fails after some seconds, and ends them."""
        deadline = time.monotonic() + seconds
        try:
            while any(process.is_alive() for process in self.processes):
                if time.monotonic() > deadline:
                    raise AssertionError(f"still running after {seconds} s:\n{self.output()}")
                time.sleep(0.02)
            return [process.exitcode for process in self.processes]
        finally:
            self.end()

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Sends a signal to a rank that runs."""
        pid = self.processes[rank].pid
        if self.processes[rank].is_alive() and pid is not None:
            os.kill(pid, number)

    def output(self) -> str:
        """What all ranks have printed."""
        return "".join(log.read_text() for log in self.logs if log.exists())


def _work(
    log: Path,
    backend: str,
    meeting: str,
    rank: int,
    ranks: int,
    environment: Mapping[str, str] | None,
    function: Callable[[], Any],
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    # As in any script; a child of a fork server would start servers of its own for its workers.
    torch.multiprocessing.set_start_method("fork", force=True)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {name: str(value) for name, value in (places | torchrun).items()} if environment is None else {}
    node, local = divmod(rank, 2)
    os.environ |= {name: value.format(rank=rank, local=local, node=node) for name, value in (environment or {}).items()}
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks, device_id=device)
    function()
