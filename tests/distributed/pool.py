"""Worker processes that stay, joined by gloo or NCCL: one start-up serves many test cases.

`ProcessPool(4).run(function, *args)` calls a module-level function on four ranks and returns their results in order.
An error on any rank is raised here with that rank's traceback; ranks that wait for it are ended with the pool, and the
next `run` starts a fresh one.

Every process group over gloo has threads that look for messages a hundred times a second, also when it is closed, until
the last object that holds it is gone. Workers that have gathered many of them are replaced, which is quick: those over
gloo are forked from a process that has all modules imported. CUDA does not live through a fork.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.forking import forking

_MOST_THREADS = 64

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Set where ranks share a GPU; torch's symmetric memory asks for it."""


class ProcessPool:
    """See the module's docstring.

    Args:
        size: Number of ranks.
        backend: ``"gloo"``, or ``"nccl"`` with a GPU for each rank.
        timeout: Seconds that one `run` may take.
        share_gpu: Whether all ranks compute on the first GPU, joined by gloo: NCCL takes a GPU for one rank only.
        with_children: Whether ranks may start processes, such as workers of a DataLoader. Then `stop` must be called.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        timeout: float = 150.0,
        *,
        share_gpu: bool = False,
        with_children: bool = False,
    ) -> None:
        assert backend == "gloo" or not share_gpu
        self.size = size
        self.backend = backend
        self._device = {"gloo": "cuda:0" if share_gpu else None, "nccl": "cuda:{rank}"}[backend]
        self.timeout = timeout
        self._daemonic = not with_children
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on every rank and returns the results in rank order."""
        self.start()
        for _, pipe in self._workers:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + self.timeout
        results: dict[int, Any] = {}
        crowded = False
        while len(results) < self.size:
            waiting = {rank: worker for rank, worker in enumerate(self._workers) if rank not in results}
            ends = [end for process, pipe in waiting.values() for end in (pipe, process.sentinel)]
            ready = wait(ends, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {[*waiting]} of {self.size} did not finish within {self.timeout} s")
            for rank, (process, pipe) in waiting.items():
                if pipe not in ready and process.sentinel not in ready:
                    continue
                try:
                    ok, value = pipe.recv()
                except (EOFError, OSError):  # the other end is gone
                    process.join(5)  # its exit code is known a moment later
                    ok, value = False, f"exit code {process.exitcode}"
                if not ok:
                    self.stop()
                    raise AssertionError(f"rank {rank} of {self.size} failed:\n{value}")
                results[rank], threads = value
                crowded |= self.backend == "gloo" and threads > _MOST_THREADS
        if crowded:
            self.stop()
        return [results[rank] for rank in range(self.size)]

    def start(self) -> None:
        """Starts the workers unless they are there, and does not wait for them: pools can start side by side."""
        if not all(process.is_alive() for process, _ in self._workers):
            self.stop()
        if not self._workers:
            self._start()

    def stop(self) -> None:
        """Ends the workers."""
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = forking() if self._device is None else mp.get_context("spawn")
        # Ranks meet in a file: of a port that is free now, nobody knows whether it is when the ranks have started.
        meeting = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            device = None if self._device is None else self._device.format(rank=rank)
            arguments = rank, self.size, meeting, self.backend, device, theirs
            process = context.Process(target=_work, args=arguments, daemon=self._daemonic)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _work(rank: int, size: int, meeting: Path, backend: str, device: str | None, pipe: Connection) -> None:
    # What torchrun would set, so that a Trainer in the worker finds its place.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # unused: the process group exists before a Trainer looks for it
        "TORCHELASTIC_RUN_ID": "tests",
    }
    faulthandler.enable()  # a crash of native code prints where it was
    torch.set_num_threads(1)
    if device is not None:
        torch.cuda.set_device(device)
        if backend == "gloo":
            os.environ[SHARED] = "1"
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=torch.device(device) if device is not None and backend == "nccl" else None,
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        # `seed_everything`, in an earlier test here or in the parent, leaves a seed there for a Trainer to start from.
        os.environ.pop("PL_GLOBAL_SEED", None)
        torch._dynamo.reset()  # what was compiled in an earlier test is not to count here
        try:
            result = function(*args, **kwargs)
            if _threads() > _MOST_THREADS:
                gc.collect()  # Trainers are in cycles, and hold their closed groups
            pipe.send((True, (result, _threads())))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
