"""A clock for training steps that never makes the device wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from lightning_videoscale.timing.marks import Marks
from lightning_videoscale.timing.step_times import Phase, StepTimes

_AT_WORK: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class StepClock:
    """Tells the phases of one rank's micro-batches apart.

    A mark on the device's line of time says which phase begins there. Marks are read when the device has passed them,
    so nobody waits for them.

    Args:
        marks: Where the time is taken; see `marks_on`.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._phase: Phase = "other"
        self._line: list[tuple[Phase, Any]] = [("other", marks.set())]
        # Each with the mark at which it ends, the first one of what follows.
        self._unread: deque[tuple[list[tuple[Phase, Any]], Any]] = deque()
        self._watches: list[StepWatch] = []

    def enter(self, phase: Phase) -> None:
        """Begins a phase and ends the one before."""
        if phase != self._phase:
            self._phase = phase
            self._line.append((phase, self._marks.set()))

    def end_micro_batch(self) -> None:
        """Ends the micro-batch; what follows is "other" until something else begins."""
        end = self._marks.set()
        self._unread.append((self._line, end))
        self._phase, self._line = "other", [("other", end)]
        self._read_what_is_past()

    def timing(self, call: Callable[..., Any], phase: Phase, within: Sequence[Phase] = _AT_WORK) -> Callable[..., Any]:
        """Returns a call that is a phase of its own.

        Args:
            call: What to time.
            phase: The phase that it is.
            within: Phases that it interrupts; in others it is a part of them, such as of validation.
        """

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._phase not in within:
                return call(*args, **kwargs)
            outer = self._phase
            self.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.enter(outer)

        return timed

    def watch(self, on_close: Callable[[], None] = lambda: None) -> StepWatch:
        """Returns a new reader of what ends from now on.

        Args:
            on_close: Called when the reader is closed.
        """
        self.read_all()  # what ended before is not for the new reader
        watch = StepWatch(self, on_close)
        self._watches.append(watch)
        return watch

    def forget(self, watch: StepWatch) -> None:
        """Gives a reader nothing more."""
        self._watches.remove(watch)

    @property
    def watched(self) -> bool:
        """Whether anybody reads."""
        return bool(self._watches)

    def read_all(self) -> None:
        """Hands out every micro-batch that has ended; waits for the device if it must."""
        if self._unread:
            self._marks.wait_for(self._unread[-1][1])
            self._read_what_is_past()

    def _read_what_is_past(self) -> None:
        while self._unread and self._marks.is_past(self._unread[0][1]):
            line, end = self._unread.popleft()
            times = self._times(line, end)
            self._marks.release(mark for _, mark in line)
            for watch in self._watches:
                watch.receive(times)

    def _times(self, line: list[tuple[Phase, Any]], end: Any) -> StepTimes:
        seconds: dict[str, float] = {}
        ends = [mark for _, mark in line[1:]] + [end]
        for (phase, begin), until in zip(line, ends, strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + self._marks.seconds(begin, until)
        return StepTimes(**seconds)


class StepWatch:
    """One reader of a clock; see `watch_steps`."""

    def __init__(self, clock: StepClock, on_close: Callable[[], None]) -> None:
        self._clock = clock
        self._on_close = on_close
        self._times: list[StepTimes] = []
        self._open = True

    def receive(self, times: StepTimes) -> None:
        """Adds a micro-batch."""
        self._times.append(times)

    def read(self) -> list[StepTimes]:
        """Returns the micro-batches that ended since the last call, in order; waits for the device to have done them.

        Meant for reports every so many steps. In ``on_train_batch_end`` the micro-batch that ends is among them.
        """
        self._clock.read_all()
        times, self._times = self._times, []
        return times

    def close(self) -> None:
        """Stops reading; the last reader takes the clock off the Trainer. Closing twice is closing once."""
        if self._open:
            self._open = False
            self._clock.forget(self)
            self._on_close()
