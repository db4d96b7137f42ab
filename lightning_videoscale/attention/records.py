"""What was measured of a kind of call, which kernel that makes the fastest, and the file in which it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionKey
from lightning_videoscale.attention.trial import Timing
from lightning_videoscale.measurement_file import MeasurementFile, versions_of_torch

SDPA = "sdpa"
"""torch's own pick."""

_WORTH = 0.99  # times as long as torch's own pick, at most: less is within the spread of the measurement


class AttentionRecord(NamedTuple):
    """What was measured of a kind of call.

    Attributes:
        timings: By kernel; `SDPA` is among them.
        reasons: Of kernels that are not among them, why.
        late: Those of them whose turn did not come in time; they are to be measured the next time.
    """

    timings: dict[str, Timing]
    reasons: dict[str, str]
    late: tuple[str, ...] = ()

    def fastest(self, calls_per_shape: float) -> str:
        """Returns the kernel that takes the least time over all calls of a shape, the first and longer one included."""

        def cost(name: str) -> float:
            steady, first = self.timings[name]
            return steady + first / calls_per_shape

        best = min(self.timings, key=lambda name: (cost(name), name))
        return best if cost(best) <= _WORTH * cost(SDPA) else SDPA

    def after(self, earlier: AttentionRecord | None) -> AttentionRecord:
        """Returns an earlier record with what was late in it as it is here; this one without an earlier record."""
        if earlier is None:
            return self
        # Both took turns with torch's own pick: by it the times of two moments compare.
        pace = earlier.timings[SDPA].steady / self.timings[SDPA].steady
        mine = {name: Timing(t.steady * pace, t.first) for name, t in self.timings.items() if name != SDPA}
        reasons = {name: reason for name, reason in earlier.reasons.items() if name not in earlier.late}
        return AttentionRecord(earlier.timings | mine, reasons | self.reasons, self.late)

    def describe(self, choice: str) -> str:
        """Such as "flash_attn_4, 1.12 x sdpa (sdpa 20.1 ms, flash_attn_4 18.0 ms; flash: 31.2 ms, 1.6 x)"."""
        gain = self.timings[SDPA].steady / self.timings[choice].steady
        times = [f"{name} {timing.steady * 1e3:.2f} ms" for name, timing in self.timings.items()]
        times += [f"first of a shape {t.first * 1e3:.0f} ms more" for t in [self.timings[SDPA]] if t.first > 0.05]
        left_out = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        what = choice if choice == SDPA else f"{choice}, {gain:.2f} x {SDPA}"
        return f"{what} ({'; '.join([', '.join(times), *left_out])})"


def slowest_of_ranks(every: Iterable[AttentionRecord]) -> AttentionRecord:
    """Returns what holds for all ranks: the longest times, of what all of them have measured."""
    first, *others = every
    reasons = {name: reason for record in (first, *others) for name, reason in record.reasons.items()}
    timings = {
        name: Timing(*map(max, zip(timing, *(other.timings[name] for other in others), strict=True)))
        for name, timing in first.timings.items()
        if all(name in other.timings for other in others)
    }
    reasons = {name: reason for name, reason in reasons.items() if name not in timings}
    # On one rank in time and on another late is late; wrong on one of them is out.
    late = [name for name in reasons if all(name in (*record.timings, *record.late) for record in (first, *others))]
    return AttentionRecord(timings, reasons, tuple(late))


class RecordFile(MeasurementFile[AttentionKey, AttentionRecord]):
    """The records of a device and these versions, on disk."""

    def __init__(self, device_name: str, folder: Path | None = None) -> None:
        packages = {kernel.package: kernel.version for kernel in KERNELS.values() if kernel.package != "torch"}
        super().__init__("attention", {"device": device_name, **versions_of_torch(), **packages}, folder)

    @override
    def from_row(self, row: Mapping[str, Any]) -> tuple[AttentionKey, AttentionRecord]:
        timings = {str(name): Timing(*map(float, timing)) for name, timing in row["timings"].items()}
        if SDPA not in timings:
            raise ValueError(f"a record lacks {SDPA}")
        reasons = {str(name): str(reason) for name, reason in row["reasons"].items()}
        return AttentionKey(*row["key"]), AttentionRecord(timings, reasons, tuple(map(str, row["late"])))

    @override
    def to_row(self, record: AttentionRecord) -> Mapping[str, Any]:
        return record._asdict()
