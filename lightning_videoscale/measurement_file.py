"""Measurements on disk: a file for each machine and set of versions, in the cache folder of the package.

What it holds are measurements. What follows from them is decided anew in each run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from lightning_videoscale.kernels.cuda.compile import cache_folder, write_whole
from lightning_videoscale.kernels.cuda.file_lock import file_lock

_Key = TypeVar("_Key", bound="tuple[Any, ...]")
_Record = TypeVar("_Record")

_log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds to wait for another process, which writes in milliseconds; a run is not held up for longer."""


class MeasurementFile(Generic[_Key, _Record]):
    """The records of this machine and these versions, by the kind of what was measured.

    Args:
        what: Is measured; the beginning of the file's name, and for messages.
        machine: All by which measurements may differ.
        folder: Where the file is; by default the package's cache folder.
    """

    def __init__(self, what: str, machine: Mapping[str, Any], folder: Path | None = None) -> None:
        self._what, self._machine = what, dict(machine)
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (folder or cache_folder()) / f"{what}-{digest}.json"

    def from_row(self, row: Mapping[str, Any]) -> tuple[_Key, _Record]:
        """Returns the kind and the record of a row; raises for what `to_row` would not have written."""
        raise NotImplementedError

    def to_row(self, record: _Record) -> Mapping[str, Any]:
        """Returns what is written of a record beside its kind, the list ``"key"``."""
        raise NotImplementedError

    def read(self) -> dict[_Key, _Record]:
        """Returns what is known; nothing, with a word in the log, where the file cannot be read."""
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["records"]
            return dict(map(self.from_row, rows))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            _log.warning("%s cannot be read (%s: %s): %s is measured anew.", self.path, kind, error, self._what)
            return {}

    def add(self, records: Mapping[_Key, _Record]) -> None:
        """Writes records beside those that are there; without success it says so in the log.

        Several processes may add at a time, as jobs do that share a home.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(self.path.with_suffix(".lock"), _PATIENCE, f"keeping what was measured of {self._what}"):
                known = self.read() | dict(records)
                rows = [{"key": list(key), **self.to_row(record)} for key, record in known.items()]
                text = json.dumps({"machine": self._machine, "records": rows}, indent=1)
                write_whole(self.path, text.encode())
        except OSError as error:
            _log.warning("What was measured of %s is not kept for the next run: %s", self._what, error)


def versions_of_torch() -> dict[str, Any]:
    """The versions by which any measurement on a device may differ."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
    }
