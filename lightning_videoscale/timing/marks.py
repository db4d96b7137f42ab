"""Marks on the line of time of a device or of the host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override


class Marks:
    """Sets marks and measures the time between two of them, by the host's clock."""

    def set(self) -> Any:
        """Returns a mark of now: of the point where the device is when it has done what it was given so far."""
        return time.perf_counter()

    def is_past(self, mark: Any) -> bool:
        """Returns whether the device has reached the mark; does not wait."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Makes the host wait until the device has come to the mark."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two marks that are past."""
        return float(end - begin)

    def release(self, marks: Iterable[Any]) -> None:
        """Takes back marks that nobody will ask about again."""


class CudaMarks(Marks):
    """CUDA events on one stream, used again and again; setting one takes the host microseconds.

    The stream is the one that is current when this is made: frameworks set others within their reductions, and marks of
    several streams have no order.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    @override
    def set(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    @override
    def is_past(self, mark: torch.cuda.Event) -> bool:
        past: bool = mark.query()
        return past

    @override
    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    @override
    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    @override
    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)


def marks_on(device: torch.device) -> Marks:
    """Returns the marks of the device that does the work."""
    return CudaMarks(device) if device.type == "cuda" else Marks()
