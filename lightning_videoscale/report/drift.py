"""Whether a run became slower while it went on: when, by how much, and what took the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.report.reading import LoggedRecord

WORTH_SAYING = 0.2
"""Share of its throughput that a run must lose."""

_FEWEST = 3
"""Windows on each side: fewer may be slow by chance."""

_APART = 0.9
"""Share of the windows on either side that must lie beyond the other side's median."""

_ALL = 1000
"""Windows up to which every division is tried: what that takes grows with their square."""

_ERRORS = 4.0
"""Standard errors that the fall must be large: it is the best of many divisions, so that two would be chance."""


class Drift(NamedTuple):
    """A fall of the throughput that lasts to the end of the run.

    Attributes:
        step: The optimizer step after which it is lower.
        before: Tokens per second, the median of the windows up to there.
        after: That of the windows since.
        same_work: How many times as long micro-batches of one shape and size take since; None where no kind of them
            is on both sides.
        grown: The part of the step, as in `StepTimes`, whose seconds per token grew most.
    """

    step: int
    before: float
    after: float
    same_work: float | None
    grown: str

    @property
    def lost(self) -> float:
        """Share of the throughput that is lost, in (0, 1)."""
        return 1 - self.after / self.before


def find_drift(windows: Sequence[LoggedRecord]) -> Drift | None:
    """Returns the fall of the throughput that divides a run best, or None where nothing says that there is one.

    Windows are few and differ by the shapes in them. So a fall counts only if it is large, beyond what their scatter
    explains, and nearly all windows before it were faster than the median one after it, and the other way round.
    """
    told = [window for window in windows if window["tokens"] and window["seconds"]]
    rates = np.array([window["tokens"] / window["seconds"] for window in told], np.float64)
    split = _best(rates, _divisions(len(told)))
    if split is None:
        return None
    split = _best(rates, _beside(split, len(told))) or split
    before, after = told[:split], told[split:]
    return Drift(
        step=int(before[-1]["step"]),
        before=float(np.median(rates[:split])),
        after=float(np.median(rates[split:])),
        same_work=_same_work(before, after),
        grown=_grown(before, after),
    )


def _stride(windows: int) -> int:
    """Windows from one division that is tried to the next."""
    return 1 if windows <= _ALL else math.isqrt(windows)


def _divisions(windows: int) -> list[int]:
    """Lengths of the first part. Of many windows some, but all near the ends, where a fall has few windows."""
    stride, last = _stride(windows), windows - _FEWEST
    ends = *range(_FEWEST, _FEWEST + 2 * stride), *range(last - 2 * stride, last + 1)
    return sorted(n for n in {*ends, *range(_FEWEST, last, stride)} if _FEWEST <= n <= last)


def _beside(split: int, windows: int) -> range:
    """The divisions around one, up to the next that were tried."""
    stride = _stride(windows)
    return range(max(_FEWEST, split - stride), min(windows - _FEWEST, split + stride) + 1)


def _best(rates: NDArray[np.float64], splits: Iterable[int]) -> int | None:
    """The fall that divides best, or None where there is none."""
    falls = (n for n in splits if _is_fall(rates[:n], rates[n:]))
    return min(falls, key=lambda n: _scatter(rates[:n]) + _scatter(rates[n:]), default=None)


def _is_fall(before: NDArray[np.float64], after: NDArray[np.float64]) -> bool:
    high, low = np.median(before), np.median(after)
    if low > (1 - WORTH_SAYING) * high or min(np.mean(before > low), np.mean(after < high)) < _APART:
        return False
    # A normal distribution's standard deviation is √(π/2) of its mean distance from the median.
    deviation = np.sqrt(np.pi / 2) * (_scatter(before) + _scatter(after)) / (len(before) + len(after))
    error = deviation * np.sqrt(1 / len(before) + 1 / len(after))
    return bool(np.log(high / low) >= _ERRORS * error)


def _scatter(rates: NDArray[np.float64]) -> float:
    """How far windows lie from their median, all together and in factors: one that is off counts little."""
    return float(np.abs(np.log(rates / np.median(rates))).sum())


def _same_work(before: Sequence[LoggedRecord], after: Sequence[LoggedRecord]) -> float | None:
    """The median factor between the seconds of micro-batches that both sides have."""
    was, now = _seconds_by_kind(before), _seconds_by_kind(after)
    ratios = [now[kind] / was[kind] for kind in was.keys() & now.keys() if was[kind] > 0]
    return float(np.median(ratios)) if ratios else None


def _seconds_by_kind(windows: Sequence[LoggedRecord]) -> dict[tuple[int, ...], float]:
    seen: dict[tuple[int, ...], list[float]] = {}
    for window in windows:
        for *kind, _, _, seconds in window["batches"]:
            seen.setdefault(tuple(kind), []).append(seconds)
    return {kind: float(np.median(seconds)) for kind, seconds in seen.items()}


def _grown(before: Sequence[LoggedRecord], after: Sequence[LoggedRecord]) -> str:
    was, now = _seconds_per_token(before), _seconds_per_token(after)
    return max(now, key=lambda part: now[part] - was[part])


def _seconds_per_token(windows: Sequence[LoggedRecord]) -> dict[str, float]:
    """Of every part of the step but what lies between steps, which is not in the throughput either."""
    tokens = sum(window["tokens"] for window in windows)
    parts = [name for name in windows[0]["ranks"] if name != "other"]
    return {part: sum(sum(window["ranks"][part]) for window in windows) / tokens for part in parts}
