"""What the shards of a folder are made of, and which of them are complete: ``packed.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_videoscale.data.shards.errors import ShardError

_FILE = "packed.json"


class LeftOutFile(NamedTuple):
    """A file that is in no shard."""

    file: str
    reason: str


class Manifest:
    """Lists all shards of an output folder from the start, so that none but its own is ever removed.

    Args:
        output: The folder; its shards that were made of something else are removed.
        digests: What each shard is to be made of.

    Attributes:
        done: What was left out of each shard that is complete.

    Raises:
        ShardError: If the folder holds what this did not write, or ``packed.json`` is damaged.
    """

    def __init__(self, output: Path, digests: Sequence[str]) -> None:
        self._output, self._digests = output, digests
        known = _pieces_of(output)
        if known is None and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ShardError(f"{output} exists and holds no {_FILE} of an earlier run: choose a new folder.")
        output.mkdir(parents=True, exist_ok=True)
        self.done: dict[int, list[LeftOutFile]] = {}
        for number, piece in enumerate(known or ()):
            is_same = number < len(digests) and piece["digest"] == digests[number]
            if is_same and piece["left_out"] is not None and self.shard(number).is_file():
                self.done[number] = [LeftOutFile(*each) for each in piece["left_out"]]
            else:
                self.shard(number).unlink(missing_ok=True)
        self._write()

    def shard(self, number: int) -> Path:
        """The path of a shard."""
        return self._output / f"{number:06}.tar"

    def add(self, number: int, left_out: list[LeftOutFile]) -> None:
        """Notes that a shard is complete."""
        self.done[number] = left_out
        self._write()

    def _write(self) -> None:
        pieces: list[dict[str, Any]] = [
            {"digest": digest, "left_out": self.done.get(number)} for number, digest in enumerate(self._digests)
        ]
        draft = self._output / f".{_FILE}"
        draft.write_text(json.dumps(pieces, indent=1, ensure_ascii=False), encoding="utf-8")
        draft.replace(self._output / _FILE)


def complete_shards(output: Path) -> list[Path] | None:
    """The shards of an output folder; None if it is not there, or some are missing.

    Raises:
        ShardError: If ``packed.json`` is damaged.
    """
    pieces = _pieces_of(output)
    shards = [output / f"{number:06}.tar" for number in range(len(pieces or ()))]
    is_complete = pieces is not None and all(piece["left_out"] is not None for piece in pieces)
    return shards if is_complete and all(shard.is_file() for shard in shards) else None


def _pieces_of(output: Path) -> list[dict[str, Any]] | None:
    file = output / _FILE
    if not file.is_file():
        return None
    try:
        pieces: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(
            f"{file} is damaged ({error}), so that nobody knows which shards are complete: delete {output}, and pack "
            "it anew."
        ) from error
    return pieces
