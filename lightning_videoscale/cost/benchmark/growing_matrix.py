"""What a benchmark has measured so far, kept on disk: one that is ended goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.cost.matrix import MatrixRow, ShapeMatrix
from lightning_videoscale.user_paths import on_disk


class GrowingMatrix:
    """The rows of a benchmark that is under way, the same on all ranks; collective to create.

    Rank 0 writes them into ``FILE.part`` after every row, and takes up those that an earlier run has left there. Only
    `finish` makes ``FILE`` of it, so that nobody takes half of a benchmark for a whole one.

    Args:
        trainer: Whose ranks measure.
        provenance: What their measurements hold for.
        capacity_bytes: Memory that a process could use.
        file: Where the matrix shall lie; None: nowhere.

    Attributes:
        rows: In the order in which they were measured.

    Raises:
        ValueError: If ``FILE.part`` is of another setting, or no matrix, or ``FILE`` is a URL.
        OSError: If it cannot be read or written.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        provenance: Mapping[str, Any],
        capacity_bytes: float | None,
        file: str | Path | None = None,
    ) -> None:
        self.rows: list[MatrixRow] = []
        self._provenance = provenance
        self._capacity_bytes = capacity_bytes
        place = None if file is None else on_disk(file, "file")
        self._file = place if trainer.is_global_zero else None
        # The file may lie on the node of rank 0 only, and what is wrong with it must end all ranks.
        begun = trainer.strategy.broadcast(self._begun())
        if isinstance(begun, Exception):
            raise begun
        self.rows.extend(begun)

    def row_of(self, cell: Cell) -> MatrixRow | None:
        """The row of a cell; None where there is none yet."""
        (frames, height, width, _), length, samples = cell
        return next((row for row in self.rows if _key(row) == (frames, height, width, samples, length)), None)

    def append(self, row: MatrixRow) -> None:
        """Adds a row and keeps it."""
        self.rows.append(row)
        self._keep()

    def improve(self, again: MatrixRow) -> None:
        """Puts a cell's second row in the place of its first, where it took less time: nothing makes a step shorter."""
        place = [_key(row) for row in self.rows].index(_key(again))
        self.rows[place] = min(self.rows[place], again, key=_seconds)
        self._keep()

    def finish(self) -> ShapeMatrix:
        """Returns the whole matrix, which then lies in its file."""
        if self._file is not None:
            self._matrix.save(self._file)
            _part(self._file).unlink(missing_ok=True)  # another job may have finished the same file
        return self._matrix

    def _keep(self) -> None:
        if self._file is not None:
            self._matrix.save(_part(self._file))

    @property
    def _matrix(self) -> ShapeMatrix:
        return ShapeMatrix(tuple(self.rows), self._provenance, self._capacity_bytes)

    def _begun(self) -> tuple[MatrixRow, ...] | Exception:
        """Rows of an earlier run. A file that cannot be written is found out now, and not after the first row."""
        if self._file is None:
            return ()
        part = _part(self._file)
        try:
            begun = ShapeMatrix.load(part) if part.exists() else self._matrix
            begun.save(part)
        except (OSError, ValueError) as error:
            return error
        if differences := begun.differences(self._provenance, list(self._provenance)):
            return ValueError(
                f"{part} holds the first {len(begun.rows)} rows of a benchmark in another setting "
                f"({'; '.join(differences)}). Go on in that one, name another file, or delete {part.name}."
            )
        if begun.rows:
            rank_zero_info(
                f"The benchmark goes on after the {len(begun.rows)} rows in {part}; delete it to measure them anew, "
                "as after a change of the model that its class and its number of parameters do not show."
            )
        return begun.rows


def _key(row: MatrixRow) -> tuple[int, ...]:
    return row.frames, row.height, row.width, row.samples, row.sequence_length


def _seconds(row: MatrixRow) -> float:
    return math.inf if row.seconds is None else row.seconds


def _part(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")
