"""The record of what was tried of every model: a line for each cell of docs/support.md."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).with_name("results.jsonl")

COLUMNS = (
    "Ulysses",
    "ring",
    "key mask",
    "per-token timesteps",
    "image conditions",
    "checkpointing",
    "compile",
    "FSDP2",
    "ZeRO-3",
    "LoRA",
    "fused parts",
)
SPLIT = "split"
"""What stands in place of a column where a class is refused altogether."""


@dataclass(frozen=True)
class Cell:
    """What one test found.

    Attributes:
        family: Of `tests.distributed.families`, or a class that is refused.
        model: Name of the class.
        column: One of `COLUMNS`, or `SPLIT`.
        outcome: ``"exact"`` if it equals one device, ``"lacks"`` if the model has no such thing, ``"refused"`` if
            the package refuses it, ``"fails"``.
        said: What stands in the cell where that is more than the outcome.
        reason: Of a gap, or a remark.
        gradients: The largest relative error of gradients; None where none were compared.
        dtype: In which they were computed.
        provenance: The commit, the date and the versions.
    """

    family: str
    model: str
    column: str
    outcome: Literal["exact", "lacks", "refused", "fails"]
    said: str = ""
    reason: str = ""
    gradients: float | None = None
    dtype: Literal["float64", "float32"] = "float64"
    provenance: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> tuple[str, str]:
        return self.family, self.column


@functools.cache
def recorded(path: Path = RESULTS) -> Mapping[tuple[str, str], Cell]:
    """By family and column, what is committed."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell.key: cell for cell in (Cell(**json.loads(line)) for line in lines)}


def add(cells: Iterable[Cell], path: Path = RESULTS) -> None:
    """Writes cells in place of those that were recorded before, in order."""
    recorded.cache_clear()
    kept = dict(recorded(path)) | {cell.key: cell for cell in cells}
    path.write_text("".join(json.dumps(asdict(kept[key])) + "\n" for key in sorted(kept)))
    recorded.cache_clear()


def confirm(family: str, *columns: str) -> None:
    """Holds the record to what a test has just shown: that a family is exact in these columns."""
    for column in columns:
        cell = recorded().get((family, column))
        assert cell is not None and cell.outcome == "exact", (
            f"{family} has just been exact with {column}, and tests/support/results.jsonl says {cell}. "
            f"Record it: make support FAMILY={family}"
        )
