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
        self._times: list[StepTimes] = []

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

    def read(self) -> list[StepTimes]:
        """Returns the micro-batches that ended since the last call; waits for the device if it must."""
        if self._unread:
            self._marks.wait_for(self._unread[-1][1])
            self._read_what_is_past()
        times, self._times = self._times, []
        return times

    def _read_what_is_past(self) -> None:
        while self._unread and self._marks.is_past(self._unread[0][1]):
            line, end = self._unread.popleft()
            self._times.append(self._phases(line, end))
            self._marks.release(mark for _, mark in line)

    def _phases(self, line: list[tuple[Phase, Any]], end: Any) -> StepTimes:
        seconds: dict[str, float] = {}
        ends = [mark for _, mark in line[1:]] + [end]
        for (phase, begin), until in zip(line, ends, strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + self._marks.seconds(begin, until)
        return StepTimes(**seconds)
