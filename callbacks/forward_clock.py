"""A clock for the forward pass that never makes the device wait."""

from __future__ import annotations

import time

import torch


class ForwardClock:
    """Measures intervals on one device and hands them out in bulk.

    On a CUDA device an interval lies between two events on the current stream: recording them costs microseconds, and
    only `drain` waits for the last one. Elsewhere it lies between two readings of the host's clock.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._begin: torch.cuda.Event | float | None = None
        self._intervals: list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = []

    def start(self) -> None:
        """Begins an interval; one that was begun before and never stopped is forgotten."""
        self._begin = self._now()

    def stop(self) -> None:
        """Ends the interval; without one begun this does nothing, so that the first of several stops counts."""
        if self._begin is not None:
            self._intervals.append((self._begin, self._now()))
            self._begin = None

    def drain(self) -> list[float]:
        """Returns the seconds of every interval since the last call, and forgets them."""
        intervals, self._intervals = self._intervals, []
        return [_seconds_between(begin, end) for begin, end in intervals]

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both ends of an interval are of one kind
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
