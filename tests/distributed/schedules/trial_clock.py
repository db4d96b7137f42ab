"""The time on a rank whose passes take as long as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, chain


def clock_of(*trials: tuple[float, float, float]) -> Callable[[], float]:
    """Turns take so many seconds, (serial, overlap, sliced), in one trial after the other.

    A trial asks for the time when it begins and before its turns, before and after each turn, and when it ends. There
    are a round before and nine rounds, of which every second one is the other way round. For so many, a round takes at
    most 0.3 s. A turn is one pass where rounds take more than 0.15 s.
    """

    def of_trial(*there: float) -> list[float]:
        turns = [*there, *chain.from_iterable([there, there[::-1]] * 4), *there]
        return [0.0, 0.0, *chain.from_iterable((0.0, turn) for turn in turns), 0.0]

    times: Iterator[float] = accumulate(chain.from_iterable(of_trial(*trial) for trial in trials))
    return lambda: next(times)
