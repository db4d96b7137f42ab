"""When a rank fails: the others say what failed first, and who is missing, and end.

A rank that raises, is killed or hangs leaves its peers in a collective. Gloo then raises "connection closed" or "timed
out", often as the last thing on the screen; NCCL ends the process, or waits. None of them says what the user needs:
what failed first, and where. `FailureDetector` does, and sees to it that no rank waits for ever.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints

from lightning_videoscale.compat.python import ThreadStack
from lightning_videoscale.ranks import gather_over_ranks, of_first_rank
from lightning_videoscale.strategies.failures.answering_store import AnsweringStore
from lightning_videoscale.strategies.failures.endings import end_by_alarm, is_broken_connection, is_timeout
from lightning_videoscale.strategies.failures.network_calls import NetworkCalls
from lightning_videoscale.strategies.failures.rank_state import (
    Process,
    RankState,
    begun_collectives,
    late_members,
    members_of,
    timeouts_of_groups,
)
from lightning_videoscale.undo import Undo

_PERIOD = 0.25  # s between looks at the processes of this machine
_BEAT = 1.0  # s between looks at the store
_SPARE = 3.0  # s before a collective's timeout at which the missing rank is named: NCCL gives no time afterwards
_GRACE = 3.0  # s beyond that in which a rank may end by itself
_TEARDOWN = 8.0  # s that a rank which has raised may take to end
_ANSWER = 3.0  # s for which a rank that ends waits for the store
_SILENCE = 4 * _BEAT  # s without a word after which a rank is taken for lost, once a connection has broken

_log = logging.getLogger(__name__)


class FailureDetector:
    """A thread on each rank that learns of failures elsewhere; collective to create.

    Every rank publishes in a store on rank 0 where it is. When another rank fails, the thread logs what
    happened, leaves the main thread some seconds to raise and to finish, and then ends the process. It notices

    - a rank that raised, by the store;
    - a rank that was killed, on its machine by the process;
    - ranks of a machine that is lost: by their silence once a connection has broken, and rank 0's by that of the store;
    - a rank that calls a network which its peers have passed by, after seconds (see `NetworkCalls`);
    - a rank that does not come to such a call, after the timeout;
    - a rank that does not come to a collective, shortly before that collective's timeout, by how many collectives each
      rank has begun.

    Args:
        host: Address of rank 0, as all ranks reach it.
        place: Says where this rank is in the run; called by the thread.
        each_look: Called with the store by the thread, every second.
        before_exit: Called before the thread ends the process.

    Attributes:
        store: What ranks of this job tell each other; ``first_error`` is there once one has failed.
    """

    def __init__(
        self,
        host: str,
        place: Callable[[], str],
        each_look: Callable[[AnsweringStore], None],
        before_exit: Callable[[], None],
    ) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._place, self._each_look, self._before_exit = place, each_look, before_exit
        self._main = ThreadStack()
        self._calls: NetworkCalls | None = None
        # What went before is no concern of this job's: an earlier one in this process may have left a rank behind.
        self._earlier = begun_collectives()
        self._cause: str | None = None
        self._deadline = float("inf")
        self._progress: dict[str, tuple[int, float]] = {}
        self._complete: dict[str, int] = {}
        self._farewell = threading.Lock()
        self._has_left = False
        self._stop = threading.Event()
        timeout = timedelta(seconds=30)
        # A store of its own: torch offers no public access to the one that the process group was started with.
        store = TCPStore(host, 0, is_master=True, timeout=timeout) if self._rank == 0 else None
        port = of_first_rank(0 if store is None else store.port)
        client = store if store is not None else TCPStore(host, port, is_master=False, timeout=timeout)
        self.store = AnsweringStore(client, _patience())
        self._publish()
        self._processes = gather_over_ranks(Process.current())
        self._thread = threading.Thread(target=self._run, name="failure-detector", daemon=True)
        self._thread.start()

    # -- the main thread -----------------------------------------------------------------------------------------

    def count_calls(self, networks: Mapping[str, tuple[nn.Module, Sequence[int]]], timeout: timedelta) -> Undo:
        """Watches the calls of networks that this rank and its peers must make together; see `NetworkCalls`.

        Args:
            networks: By name, wrapped already, each with the global ranks that call it together.
            timeout: How long a rank waits for another.

        Returns:
            A function that ends it.
        """
        # The whole timeout: where a collective waits, it says before that which one it is.
        self._calls = calls = NetworkCalls(self._rank, self._begun, timeout.total_seconds())
        undo = Undo()
        for name, (network, ranks) in networks.items():
            undo.add(calls.count(network, name, ranks))
        return undo

    def report(self, exception: BaseException) -> None:
        """Notes this rank's error for all ranks, or learns what came before it and adds that to the exception.

        Args:
            exception: What this rank failed with; shows the cause at its end when printed.
        """
        self._deadline = time.monotonic() + _TEARDOWN
        # The thread needs the interpreter's lock, which a main thread that frees memory of a failed GPU does not give.
        faulthandler.dump_traceback_later(_TEARDOWN + 4 * _PERIOD, exit=True)
        self.store.patience = _ANSWER
        if isinstance(exception, torch.AcceleratorError):
            atexit.register(partial(end_by_alarm, _TEARDOWN))
        if self._cause is None:
            self._add_calls(exception)
            try:
                self._cause = self._await_cause(exception)
                if self._cause is None:
                    self._note_first(exception)
            except dist.DistError:
                self._cause = self._without_store()
            if self._cause is not None:
                _log.error(f"[rank {self._rank}] {self._cause}")
        if self._cause is not None:
            exception.add_note(self._cause)

    def close(self) -> None:
        """Ends the watch of a rank that has finished, whether well or not; rank 0 waits until all ranks know it."""
        faulthandler.cancel_dump_traceback_later()
        if self._stop.is_set():
            return
        self.store.patience = _ANSWER
        try:
            self._has_left = True
            self._publish()
            self.store.set(f"left/{self._rank}", "")
            self._say_farewell()
            deadline = time.monotonic() + 5 * _BEAT
            while self._rank == 0 and self.store.add("farewells", 0) < self._size and time.monotonic() < deadline:
                time.sleep(0.01)
        except dist.DistError:
            pass  # rank 0 is gone, and the others notice by themselves
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.store.close()

    def _add_calls(self, exception: BaseException) -> None:
        """Adds who is in a network without its peers, whose other collectives may have paired with this rank's."""
        if self._calls is None or not (is_timeout(exception) or is_broken_connection(exception)):
            return
        try:
            states = self._read(self._calls.peers)
        except dist.DistError:
            states = {}
        if apart := self._calls.explain(self._state(), states):
            exception.add_note(apart)

    def _await_cause(self, exception: BaseException) -> str | None:
        """What failed before this error, which a broken connection shows earlier than anything else does."""
        cause = self._failed_elsewhere()
        if cause is not None or not is_broken_connection(exception):
            return cause
        before = self._read(range(self._size))
        deadline = time.monotonic() + _SILENCE
        while cause is None and time.monotonic() < deadline:
            time.sleep(_PERIOD / 2)
            cause = self._failed_elsewhere()
        return cause or self._silent_since(before)

    def _note_first(self, exception: BaseException) -> None:
        if is_timeout(exception) and (late := self._describe_late(self._begun())):
            exception.add_note(late)
        notes = getattr(exception, "__notes__", [])
        mine = "\n".join([f"rank {self._rank}: {type(exception).__name__}: {exception}", *notes])
        first = self.store.compare_set("first_error", "", mine).decode()
        if first != mine:
            self._cause = f"The first error of the job was on {first}"

    # -- what can be seen of the others --------------------------------------------------------------------------

    def _failed_elsewhere(self) -> str | None:
        if self.store.check(["first_error"]):
            return f"The first error of the job was on {self.store.get('first_error').decode()}"
        here = self._processes[self._rank]
        for rank, process in enumerate(self._processes):
            if process.has_ended(here) and not self.store.check([f"left/{rank}"]):
                state = RankState.load(self.store.get(f"state/{rank}").decode())
                gone = f"rank {rank}: its process {process.pid} ended without a word, as when it is killed ({state})."
                first: str = self.store.compare_set("first_error", "", gone).decode()
                return f"The first error of the job was on {first}"
        return None

    def _silent_since(self, before: Mapping[int, RankState]) -> str | None:
        """Names the ranks that have published nothing since; by their own clocks, as machines' clocks differ."""
        now = self._read(range(self._size))
        silent = [r for r, state in now.items() if r != self._rank and state.time == before[r].time]
        silent = [rank for rank in silent if not now[rank].has_left]
        if not silent:
            return None
        hosts = sorted({self._processes[rank].host for rank in silent})
        gone = (
            f"ranks {silent} of {', '.join(hosts)}: nothing was heard of them for {_SILENCE:.0f} s after a connection "
            f"broke, as when a machine is lost (rank {silent[0]}: {now[silent[0]]})."
        )
        first: str = self.store.compare_set("first_error", "", gone).decode()
        return f"The first error of the job was on {first}"

    def _without_store(self) -> str:
        here, process = self._processes[self._rank], self._processes[0]
        if process.has_ended(here):
            how = f"its process {process.pid} ended without a word, as when it is killed"
        elif process.machine == here.machine:
            how = "it does not answer"
        else:
            others = [rank for rank, other in enumerate(self._processes) if other.machine == process.machine]
            how = f"it does not answer, as when {process.host} with ranks {others} is lost, or the network to it"
        return f"The first error of the job was on rank 0: {how}."

    def _describe_late(self, counts: Mapping[str, int]) -> str:
        """Who has not come to the collectives that this rank has begun; empty if nobody is missing."""
        states = self._read(range(self._size))
        states[self._rank] = replace(states[self._rank], collectives=dict(counts))
        late = late_members(self._rank, states)
        missing = sorted({rank for ranks in late.values() for rank in ranks})
        if not missing:
            return ""
        ranks = ", ".join(f"rank {rank} ({states[rank]})" for rank in missing)
        return f"Missing in a collective of ranks {members_of(next(iter(late)))}: {ranks}."

    def _apart(self) -> str | None:
        """Names who waits in a network for peers that passed it by or are too late; warns of others that stay away."""
        if self._calls is None:
            return None
        what, gives_up = self._calls.look(self._state(), self._read)
        if what and not gives_up:
            _log.warning(f"[rank {self._rank}] {what}")
        if not gives_up:
            return None
        first: str = self.store.compare_set("first_error", "", f"rank {self._rank}: {what}").decode()
        return f"The first error of the job was on {first}"

    def _overdue(self) -> str | None:
        """Names who is missing in a collective that will soon have waited as long as its group allows."""
        counts, timeouts, now = self._begun(), timeouts_of_groups(), time.monotonic()
        waiting = {}
        for name, count in counts.items():
            if self._progress.get(name, (0, 0.0))[0] != count:
                self._progress[name] = count, now
            waited = now - self._progress.get(name, (0, now))[1]
            if waited > _before(timeouts[name]) and self._complete.get(name, 0) != count:
                waiting[name] = count
        if not waiting:
            return None
        late = self._describe_late(waiting)
        if not late:
            self._complete |= waiting  # all have come, and need not be asked again
            return None
        cause = f"A collective's timeout of {min(timeouts[name] for name in waiting)} passes. {late}"
        self.store.compare_set("first_error", "", f"rank {self._rank}: {cause}")
        return cause

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._stop.wait(_PERIOD):
            if time.monotonic() > self._deadline:
                self._exit()
            if self._cause is not None:
                continue
            here = self._processes[self._rank]
            due = time.monotonic() > beat
            try:
                if due or any(process.has_ended(here) for process in self._processes):
                    beat = time.monotonic() + _BEAT
                    self._look()
            except dist.DistError:
                self._fail(self._without_store())

    def _look(self) -> None:
        if self._deadline == float("inf"):
            self.store.patience = _patience()
        self._publish()
        self._each_look(self.store)
        if cause := self._failed_elsewhere() or self._apart() or self._overdue():
            self._fail(cause)
            self._say_farewell()
        elif self.store.check(["left/0"]):
            self._say_farewell()
            self._stop.set()  # the store goes with rank 0

    def _fail(self, cause: str) -> None:
        if self._deadline < float("inf"):  # the main thread has raised, and has reported it
            return
        self._cause = cause
        self._deadline = time.monotonic() + _SPARE + _GRACE
        _log.error(f"[rank {self._rank}] {cause}")

    def _exit(self) -> None:
        _log.error(f"[rank {self._rank}] ends now, as its main thread does not return.")
        self._before_exit()
        sys.stdout.flush()
        os._exit(1)

    def _publish(self) -> None:
        self.store.set(f"state/{self._rank}", self._state().dump())

    def _state(self) -> RankState:
        # The collectives first: were a call entered in between, this rank would seem to have passed it by.
        begun = self._begun()
        calls = self._calls.counts if self._calls is not None else {}
        place = "after its run" if self._has_left else self._place()
        return RankState.current(place, self._main, begun, calls, self._has_left)

    def _read(self, ranks: Iterable[int]) -> dict[int, RankState]:
        ranks = list(ranks)
        texts = self.store.multi_get([f"state/{rank}" for rank in ranks])
        return {rank: RankState.load(text.decode()) for rank, text in zip(ranks, texts, strict=True)}

    def _begun(self) -> dict[str, int]:
        """How many collectives this rank has begun in each of its groups since the watch began."""
        return {name: count - self._earlier.get(name, 0) for name, count in begun_collectives().items()}

    def _say_farewell(self) -> None:
        """Once for each rank: that it has left, or knows that rank 0 has."""
        if self._farewell.acquire(blocking=False):
            self.store.add("farewells", 1)


def _patience() -> float:
    """How long an answer may take while nothing has failed: until a collective that waits as long would."""
    return min(_before(min(timeouts_of_groups().values())), threading.TIMEOUT_MAX)


def _before(timeout: timedelta) -> float:
    """Seconds after which a rank that is missing is named, shortly before a timeout."""
    seconds = timeout.total_seconds()
    return seconds - min(_SPARE, 0.2 * seconds)
