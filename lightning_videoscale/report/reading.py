"""Reads the log of a run back, whatever state a crash left it in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_videoscale.report.log import LOG_NAME, VERSION

LoggedRecord = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """What a run logged, in order.

    Attributes:
        folder: Where the log lies.
        records: The records of the run; of steps that a resumed run repeated, the later ones.
        notes: What a reader should know about the log itself, in sentences.
    """

    folder: Path
    records: Sequence[LoggedRecord]
    notes: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[LoggedRecord]:
        """All records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> LoggedRecord | None:
        """The last record of a kind, or None."""
        found = self.of(kind)
        return found[-1] if found else None


def read_run(folder: str | Path) -> RunRecords:
    """Reads the log of the last run in a folder, with all of its resumptions there.

    Args:
        folder: The folder that `RunReport` wrote to, or the log itself.

    Raises:
        FileNotFoundError: If there is no log; the message names logs below the folder.
        ValueError: If the log holds no run, or was written by a newer version.
    """
    path = Path(folder)
    file = path if path.is_file() else path / LOG_NAME
    if not file.is_file():
        below = sorted(str(found.parent) for found in path.glob(f"**/{LOG_NAME}"))[:5]
        hint = f"there are logs in {', '.join(below)}" if below else "train with callbacks=[RunReport()] to get one"
        if not path.exists():
            hint = f"there is no such folder. The current folder is {Path.cwd()}"
        raise FileNotFoundError(f"No {LOG_NAME} in {path}: {hint}.")
    records, notes = _parse(file)
    newest = max((record["v"] for record in records), default=VERSION)
    if newest > VERSION:
        raise ValueError(
            f"{file} was written in version {newest} of the log and this package reads {VERSION}: update it."
        )
    records = _last_run(records, notes)
    if not records:
        raise ValueError(f"{file} holds no run: no record says that one began.")
    return RunRecords(file.parent, records, notes)


def _parse(file: Path) -> tuple[list[LoggedRecord], list[str]]:
    """All whole records, and a note on lines that are none."""
    records: list[LoggedRecord] = []
    damaged: list[int] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = _record(line)
            if record is None:
                damaged.append(number)
            else:
                records.append(record)
    if not damaged:
        return records, []
    what = f"Line {damaged[0]}" if len(damaged) == 1 else f"Lines {', '.join(map(str, damaged[:5]))}"
    return records, [f"{what} of {file.name} cannot be read, as after a kill while writing, and is left out."]


def _record(line: str) -> LoggedRecord | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and {"v", "kind", "step", "time"} <= record.keys() and isinstance(record["v"], int)
    return record if whole else None


def _last_run(records: list[LoggedRecord], notes: list[str]) -> list[LoggedRecord]:
    """The last run from step 0 on, in which resumptions replace the steps that they repeat."""
    starts = [n for n, record in enumerate(records) if record["kind"] == "start"]
    if not starts:
        return []
    fresh = [n for n in starts if records[n]["step"] == 0]
    begin = fresh[-1] if fresh else starts[0]
    if earlier := sum(n < begin for n in starts):
        notes.append(f"The log also holds {earlier} earlier start{'s' if earlier > 1 else ''}, left out here.")
    if before := records[begin]["step"]:
        notes.append(f"The log begins behind step {before}: what the run trained before is not in these figures.")
    run: list[LoggedRecord] = []
    for record in records[begin:]:
        if record["kind"] == "start":
            kept = [known for known in run if known["step"] <= record["step"]]
            if len(kept) < len(run):
                repeated = max(known["step"] for known in run) - record["step"]
                notes.append(f"{repeated} steps after step {record['step']} were trained again after a restart.")
            if unknown := record["step"] - max(_recorded(kept), default=record["step"]):
                notes.append(f"{unknown} steps up to step {record['step']} are in no record: a restart came between.")
            run = kept
        run.append(record)
    return run


def _recorded(records: Sequence[LoggedRecord]) -> list[int]:
    """The steps up to which windows reach, and at which trainings start."""
    return [record["step"] for record in records if record["kind"] in ("window", "start")]
