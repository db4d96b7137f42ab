"""Notices, from the host, that a stream waits for a peer that does not come, and says which one.

A stream that waits for a flag waits for ever, and so does the thread that waits for the stream. A thread of the host
therefore looks, a few times a second, at how long the streams have been waiting. When a wait has lasted too long it
reads the flags, logs who is missing, and fails an assertion on the device: every later use of the device on this rank
raises, so nothing computed from a message that never came can reach a weight or a checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.cuda import assert_on_device

_MOST_FLAGS = 4096

_log = logging.getLogger(__name__)


class Taking(NamedTuple):
    """Flags that a stream waits for at one point, all together, and then clears.

    Attributes:
        ranks: By flag, the global rank of the peer that sets it.
        taken: Recorded behind.
    """

    ranks: Mapping[int, int]
    taken: Recorded


class Recorded(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether the stream has come there."""


class _Flagged(Protocol):
    flags: Tensor


def missing_ranks(flags: Sequence[int], takings: Sequence[Taking]) -> list[int]:
    """Returns the global ranks that have not set a flag that a stream still waits for, in order."""
    waiting = [taking for taking in takings if not taking.taken.query()]
    return sorted({rank for taking in waiting for flag, rank in taking.ranks.items() if not flags[flag]})


@dataclass
class _Wait:
    """Work of a stream between two events, and since when the host has seen it begun and not ended."""

    what: str
    memory: weakref.ref[_Flagged]
    takings: Sequence[Taking]
    began: torch.cuda.Event
    ended: torch.cuda.Event
    since: float | None = None


class PeerWatchdog:
    """Watches the waits of one GPU, none of which may last longer than ``timeout``."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._state = _State(device, timeout)
        self._thread: threading.Thread | None = None

    @property
    def failure(self) -> str | None:
        """Which peers did not come, once one did not."""
        return self._state.failure

    @contextmanager
    def watched(self, what: str, memory: _Flagged, takings: Sequence[Taking]) -> Iterator[None]:
        """Watches what the current stream is given inside.

        Args:
            what: Names the work in the message.
            memory: Holds this rank's flags, int32, on the device.
            takings: What the work waits for; some may be added inside.
        """
        began, ended = torch.cuda.Event(), torch.cuda.Event()
        began.record()
        yield
        ended.record()
        self._state.waits.append(_Wait(what, weakref.ref(memory), takings, began, ended))
        if self._thread is None:
            # The thread knows the state alone, so that it does not keep the watch, and the memory it reads, alive.
            self._thread = threading.Thread(target=self._state.run, name="peer-watchdog", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._state.stop.set)


class _State:
    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.timeout = timeout
        self.waits: deque[_Wait] = deque()
        self.failure: str | None = None
        self.stop = threading.Event()
        # Another priority than any stream that may be stuck: streams of one priority can share a queue of the device.
        self.stream = torch.cuda.Stream(device, priority=-3)
        with torch.cuda.stream(self.stream):
            self.false = torch.zeros(1, device=device)
            assert_on_device(self.false + 1)  # loads the kernel: loading may wait for the whole device
        self.stream.synchronize()
        # Taken now: page-locking memory may wait for the whole device.
        self.host = torch.empty(_MOST_FLAGS, dtype=torch.int32, pin_memory=True)

    def run(self) -> None:
        torch.cuda.set_device(self.device)
        interval = min(0.25, self.timeout.total_seconds() / 4)
        while not self.stop.wait(interval):
            try:
                late = self._late()
            except RuntimeError:  # the device has failed for another reason, which whoever uses it will raise
                return
            memory = late.memory() if late is not None else None
            if late is not None and memory is not None:
                self._fail(late, memory)
                # Freed on a failed device, symmetric memory would end the process: this thread keeps it.
                threading.Event().wait()

    def _late(self) -> _Wait | None:
        while self.waits:
            wait = self.waits[0]
            if wait.ended.query():
                self.waits.popleft()
                continue
            now = time.monotonic()
            if wait.since is None and wait.began.query():
                wait.since = now
            over = wait.since is not None and now - wait.since > self.timeout.total_seconds()
            return wait if over else None
        return None

    def _fail(self, wait: _Wait, memory: _Flagged) -> None:
        flags = self._read(memory.flags)
        missing = missing_ranks(flags, wait.takings) if flags is not None else "(the device does not tell which)"
        self.failure = (
            f"{wait.what} waited {self.timeout} for ranks {missing}, which did not come. See what they printed first."
        )
        _log.error(self.failure)
        with torch.cuda.stream(self.stream):
            assert_on_device(self.false)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                wait.ended.query()
            except RuntimeError:
                return
            time.sleep(0.1)
        # The device did not take the assertion: as NCCL's watchdog does, end the process rather than let it hang.
        os.abort()

    def _read(self, flags: Tensor) -> list[int] | None:
        with torch.cuda.stream(self.stream):
            copy = self.host[: len(flags)]
            copy.copy_(flags, non_blocking=True)
            done = self.stream.record_event()
        deadline = time.monotonic() + 5
        while not done.query():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return [int(flag) for flag in copy.tolist()]
