"""Threads that stand for ranks and their streams, for the protocol of the symmetric transport."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.parallel import Axis
from lightning_videoscale.parallel.transport.draining import drain
from lightning_videoscale.parallel.transport.peer_watchdog import Taking
from lightning_videoscale.parallel.transport.rendezvous import HostExchanges
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport

PATIENCE = 20.0


class World:
    """What the ranks have in common: one lock, and what they bring to their exchanges."""

    def __init__(self, size: int, guard: bool = True) -> None:
        self.size = size
        self.guard = guard  # whether senders heed that a slot is in use
        self.changed = threading.Condition()
        self.store = dist.HashStore()
        self.allocations: dict[int, dict[int, Any]] = {}

    def meet(self, count: int, rank: int, mine: Any) -> list[Any]:
        with self.changed:
            brought = self.allocations.setdefault(count, {})
            brought[rank] = mine
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(brought) == self.size, PATIENCE)
            return [brought[peer] for peer in range(self.size)]


class ThreadMemory:
    """Memory of which every thread can reach every part."""

    def __init__(self, world: World, rank: int, buffers: list[Tensor], flags: list[Tensor]) -> None:
        self.buffers = buffers
        self.nbytes = buffers[rank].nbytes
        self.flags = flags[rank]
        self._all_flags = flags
        self._world = world

    def signal(self, rank: int, flag: int) -> None:
        with self._world.changed:
            self._all_flags[rank][flag] = 1
            self._world.changed.notify_all()

    def take(self, flags: Sequence[int]) -> None:
        heeded = [flag for flag in flags if flag < len(self.flags) // 2 or self._world.guard]
        with self._world.changed:
            assert self._world.changed.wait_for(lambda: all(self.flags[flag] for flag in heeded), PATIENCE)
            for flag in heeded:
                self.flags[flag] = 0


class Point:
    """One of a stream."""

    def __init__(self, reached: bool = True) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


class Pushed:
    def __init__(self, future: Future[None]) -> None:
        self.wait = future.result


class ThreadInterconnect:
    """A rank's own thread stands for its current stream, another for its side stream.

    What is submitted to `stream` stands for what the device has yet to do while the host goes on.
    """

    failure = None

    def __init__(self, world: World, rank: int, delays: random.Random | None = None, timeout: float = PATIENCE) -> None:
        self._world, self._rank, self._delays = world, rank, delays
        self._timeout = timedelta(seconds=timeout)
        self.stream, self._side = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._exchanges = HostExchanges("threads", self._timeout)
        self._allocations = 0

    def agree(self, told: Any, axis: Axis, purpose: str) -> list[Any]:
        return self._exchanges.agree(told, axis, self._world.store, purpose)

    def allocate(self, nbytes: int, flags: int, axis: Axis) -> ThreadMemory:
        self._allocations += 1
        mine = torch.full((nbytes,), 255, dtype=torch.uint8), torch.zeros(flags, dtype=torch.int32)
        everyone = self._world.meet(self._allocations, self._rank, mine)
        return ThreadMemory(self._world, self._rank, [data for data, _ in everyone], [flags for _, flags in everyone])

    def aside(self, work: Callable[[], None]) -> Pushed:
        return Pushed(self._side.submit(self._delayed, work))

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def take(self, memory: Any, ranks: Mapping[int, int]) -> Taking:
        memory.take(list(ranks))
        return Taking(ranks, Point())

    def watched(self, what: str, memory: Any, takings: Sequence[Taking]) -> AbstractContextManager[None]:
        return nullcontext()

    def come_to_rest(self, axis: Axis, release: Callable[[Sequence[int]], None]) -> list[str | None]:
        resting = self._exchanges.begin(axis, self._world.store, "to come to rest in `reset`")
        resting.tell(self.drain(lambda: release(resting.have_told())))
        return resting.hear()

    def drain(self, release: Callable[[], None]) -> str | None:
        return self.failure or drain(self._synchronize, release, self._timeout)

    def renew(self) -> None:
        self._exchanges.renew()

    def end(self) -> None:
        """Ends the threads: what backward left on one is freed with it, and not when the interpreter is gone."""
        self.stream.shutdown()
        self._side.shutdown()

    def close(self, axis: Axis) -> None:
        self.agree(None, axis, "to close the transport")
        self.renew()

    def _synchronize(self) -> None:
        for queue in (self.stream, self._side):  # the stream fills the other
            queue.submit(int).result()

    def _delayed(self, work: Callable[[], None]) -> None:
        if self._delays is not None and self._delays.random() < 0.3:
            time.sleep(self._delays.random() * 0.002)
        work()


def axis_of(rank: int, size: int) -> Axis:
    return Axis("ulysses", None, tuple(range(10, 10 + size)), rank)  # type: ignore[arg-type]  # no group to exchange by


def on_threads(
    size: int,
    work: Callable[[Any, int], Any],
    guard: bool = True,
    kind: type[SymmetricTransport] = SymmetricTransport,
    interconnect: type[ThreadInterconnect] = ThreadInterconnect,
    timeout: float = PATIENCE,
) -> list[Any]:
    """Calls ``work(transport, rank)`` on a thread for each rank and returns the results by rank."""
    world = World(size, guard)
    interconnects = [interconnect(world, rank, random.Random(rank), timeout) for rank in range(size)]
    transports = [kind(each, axis_of(rank, size), slots=4) for rank, each in enumerate(interconnects)]
    with ExitStack() as ending, ThreadPoolExecutor(size) as pool:
        for each in interconnects:
            ending.callback(each.end)
        futures = [pool.submit(work, transport, rank) for rank, transport in enumerate(transports)]
        return [future.result() for future in futures]
