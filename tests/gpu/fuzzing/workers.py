"""Cases over processes: each has the variants of its own, so that nothing is compiled twice, and survives the others.

A process whose case leaves the device unusable, dies or hangs is replaced by one that goes on behind that case.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from tests.gpu.fuzzing.cases import SEEDS_OF_A_POOL, Options, Verdict, case_of, judge, variant_number

_PATIENCE = 240.0  # seconds for one case, compilation included


def verdicts(seeds: Iterable[int], options: Options, workers: int) -> Iterator[Verdict]:
    """Judges every case, those that compile first; in this process where there are no workers."""
    if not workers:
        quietly(options)
        for seed in seeds:
            yield judge(seed, options)
        return
    shares: list[list[int]] = [[] for _ in range(workers)]
    for seed in seeds:
        shares[(variant_number(seed) + seed // SEEDS_OF_A_POOL) % workers].append(seed)
    yield from _from_processes([_compiling_first(share) for share in shares], options)


def quietly(options: Options) -> None:
    """Settings of a process that judges: one thread, and no word on what `fill_uninitialized_memory` asks for."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False


def _compiling_first(seeds: list[int]) -> list[int]:
    """A first case of every variant, then all others."""
    first: dict[tuple[int, int], int] = {}
    for seed in seeds:
        first.setdefault((seed // SEEDS_OF_A_POOL, variant_number(seed)), seed)
    compiling = set(first.values())
    return [*compiling, *(seed for seed in seeds if seed not in compiling)]


@dataclass
class _Worker:
    """A process, and what it has yet to do.

    Attributes:
        process: It.
        connection: Where its verdicts come from.
        left: The seeds without a verdict, the one it is at first.
        since: When it began with that.
    """

    process: BaseProcess
    connection: Connection
    left: list[int]
    since: float

    @classmethod
    def start(cls, seeds: list[int], options: Options) -> _Worker:
        context = mp.get_context("spawn")
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, seeds, options), daemon=True)
        process.start()
        theirs.close()
        return cls(process, mine, seeds, time.monotonic())


def _work(connection: Connection, seeds: list[int], options: Options) -> None:
    quietly(options)
    for seed in seeds:
        verdict = judge(seed, options)
        connection.send(verdict)
        if verdict.fatal:
            return


def _from_processes(shares: list[list[int]], options: Options) -> Iterator[Verdict]:
    workers = [_Worker.start(share, options) for share in shares if share]
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=1.0)
        for worker in list(workers):
            verdict = None
            if worker.connection in ready:
                with contextlib.suppress(EOFError):
                    verdict = worker.connection.recv()
                if verdict is None:
                    worker.process.join()
                    verdict = _lost(worker, options, f"its process died with exit code {worker.process.exitcode}")
            elif time.monotonic() - worker.since > _PATIENCE:
                verdict = _lost(worker, options, f"no result in {_PATIENCE:.0f} s")
            if verdict is None:
                continue
            worker.left, worker.since = worker.left[1:], time.monotonic()
            yield verdict
            if verdict.fatal or not worker.left:
                workers.remove(worker)
                worker.process.kill() if verdict.fatal else worker.process.join()
                if worker.left:
                    workers.append(_Worker.start(worker.left, options))


def _lost(worker: _Worker, options: Options, message: str) -> Verdict:
    variant = case_of(worker.left[0], options).variant
    return Verdict(worker.left[0], variant.op, variant.backend, "wrong", message, fatal=True)
