"""What was measured of a kind of layer, which schedule that makes the fastest, and the file in which it is kept."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from typing_extensions import override

from lightning_videoscale.measurement_file import MeasurementFile, versions_of_torch
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.table import ScheduleKey, fastest

_MADE = 5  # counted up when a schedule or the trial changes so that older measurements say nothing


class ScheduleRecord(NamedTuple):
    """What was measured of a kind of layer, of the slowest rank.

    Attributes:
        seconds: Of forward and backward, by schedule; empty where a trial failed.
        gains: How many times as fast as "serial", turn by turn, the median.
        reason: Why nothing was measured, or None.
    """

    seconds: dict[ScheduleName, float]
    gains: dict[ScheduleName, float]
    reason: str | None = None

    @classmethod
    def of_turns(cls, turns: Mapping[ScheduleName, Sequence[float]]) -> ScheduleRecord:
        """Returns what the seconds of each turn say; schedules took them one after the other."""
        gains = {
            name: statistics.median(a / b for a, b in zip(turns["serial"], mine, strict=True))
            for name, mine in turns.items()
        }
        return cls({name: statistics.median(mine) for name, mine in turns.items()}, gains)

    @property
    def fastest(self) -> ScheduleName:
        """The schedule to run."""
        return fastest(self.gains)

    def __str__(self) -> str:
        """Such as "sliced, 1.07 x serial (serial 10.20 ms, sliced 9.53 ms)"."""
        if self.reason is not None:
            return f"serial, since it could not be measured ({self.reason})"
        times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self.seconds.items())
        gain = "" if self.fastest == "serial" else f", {self.gains[self.fastest]:.2f} x serial"
        return f"{self.fastest}{gain} ({times})"


class ScheduleFile(MeasurementFile[ScheduleKey, ScheduleRecord]):
    """The records of a kind of device and these versions, on disk; apart those of steps by CUDA graphs."""

    def __init__(self, device_name: str, folder: Path | None = None, *, by_graphs: bool = False) -> None:
        nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
        machine = {"device": device_name, **versions_of_torch(), "nccl": nccl, "schedules": _MADE, "graphs": by_graphs}
        super().__init__("schedules", machine, folder)

    @override
    def from_row(self, row: Mapping[str, Any]) -> tuple[ScheduleKey, ScheduleRecord]:
        names: tuple[ScheduleName, ...] = get_args(ScheduleName)
        seconds, gains = (
            {name: float(row[column][name]) for name in names if name in row[column]} for column in ("seconds", "gains")
        )
        if "serial" not in seconds or gains.keys() != seconds.keys():
            raise ValueError("a record lacks the serial schedule, or a gain")
        return ScheduleKey(*row["key"]), ScheduleRecord(seconds, gains)

    @override
    def to_row(self, record: ScheduleRecord) -> Mapping[str, Any]:
        return {"seconds": record.seconds, "gains": record.gains}
