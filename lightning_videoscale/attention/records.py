"""What was measured of a kind of call, which kernel that makes the fastest, and the file in which it is kept.

The file is one per machine and versions, in the cache folder of the package. What it holds are measurements: which
kernel is chosen is decided anew in each run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionKey
from lightning_videoscale.attention.trial import Timing
from lightning_videoscale.kernels.cuda.compile import cache_folder

SDPA = "sdpa"
"""torch's own pick."""

_WORTH = 0.99  # times as long as torch's own pick, at most: less is within the spread of the measurement
_log = logging.getLogger(__name__)


class Record(NamedTuple):
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
        """Returns the kernel that takes the least time over all calls of a shape, the first and longer one included.

        Args:
            calls_per_shape: How often a shape is expected to be computed in a run.
        """

        def cost(name: str) -> float:
            steady, first = self.timings[name]
            return steady + first / calls_per_shape

        best = min(self.timings, key=lambda name: (cost(name), name))
        return best if cost(best) <= _WORTH * cost(SDPA) else SDPA

    def after(self, earlier: Record | None) -> Record:
        """Returns an earlier record with what was late in it as it is here; this one without an earlier record."""
        if earlier is None:
            return self
        # Both took turns with torch's own pick: by it the times of two moments compare.
        pace = earlier.timings[SDPA].steady / self.timings[SDPA].steady
        mine = {name: Timing(t.steady * pace, t.first) for name, t in self.timings.items() if name != SDPA}
        reasons = {name: reason for name, reason in earlier.reasons.items() if name not in earlier.late}
        return Record(earlier.timings | mine, reasons | self.reasons, self.late)

    def describe(self, choice: str) -> str:
        """Such as "flash_attn_4, 1.12 x sdpa (sdpa 20.1 ms, flash_attn_4 18.0 ms; flash: 31.2 ms, 1.6 x)"."""
        gain = self.timings[SDPA].steady / self.timings[choice].steady
        times = [f"{name} {timing.steady * 1e3:.2f} ms" for name, timing in self.timings.items()]
        times += [f"first of a shape {t.first * 1e3:.0f} ms more" for t in [self.timings[SDPA]] if t.first > 0.05]
        left_out = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        what = choice if choice == SDPA else f"{choice}, {gain:.2f} x {SDPA}"
        return f"{what} ({'; '.join([', '.join(times), *left_out])})"


def slowest_of_ranks(every: Iterable[Record]) -> Record:
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
    return Record(timings, reasons, tuple(late))


class RecordFile:
    """The records of this machine and these versions, on disk.

    Args:
        device_name: Of the device that is measured.
        folder: Where the file is; by default the package's cache folder.
    """

    def __init__(self, device_name: str, folder: Path | None = None) -> None:
        self._machine = _machine(device_name)
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"attention-{digest}.json"

    def read(self) -> dict[AttentionKey, Record]:
        """Returns what is known; nothing, with a word in the log, where the file cannot be read."""
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["records"]
            return {AttentionKey(*row["key"]): _record(row) for row in rows}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read (%s: %s): attention is measured anew.", self.path, type(error), error)
            return {}

    def add(self, records: Mapping[AttentionKey, Record]) -> None:
        """Writes records beside those that are there; without success it says so in the log."""
        rows = [
            {"key": list(key), "timings": record.timings, "reasons": record.reasons, "late": record.late}
            for key, record in (self.read() | dict(records)).items()
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, delete=False, encoding="utf-8"
            ) as file:
                json.dump({"machine": self._machine, "records": rows}, file, indent=1)
            os.replace(file.name, self.path)
        except OSError as error:
            _log.warning("What was measured of attention is not kept for the next run: %s", error)


def _record(row: Mapping[str, Any]) -> Record:
    timings = {str(name): Timing(*map(float, timing)) for name, timing in row["timings"].items()}
    if SDPA not in timings:
        raise ValueError(f"a record lacks {SDPA}")
    reasons = {str(name): str(reason) for name, reason in row["reasons"].items()}
    return Record(timings, reasons, tuple(map(str, row["late"])))


def _machine(device_name: str) -> dict[str, Any]:
    """All by which measurements may differ."""
    packages = {kernel.package: kernel.version for kernel in KERNELS.values() if kernel.package != "torch"}
    return {
        "device": device_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        **packages,
    }
