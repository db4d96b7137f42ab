"""What a shape benchmark measured, and where: a file that both models are fitted to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.user_paths import local

RowOutcome = Literal["measured", "out_of_memory", "not_tried"]
"""``not_tried``: the peaks of smaller micro-batches say that it does not fit, and a rank that runs out of memory would
leave the others waiting in a collective. Or its own first step says so."""

_FORMAT = 1


@dataclass(frozen=True)
class MatrixRow:
    """One micro-batch of the benchmark.

    Attributes:
        frames: Frames F of its samples, or latent frames.
        height: Their height H.
        width: Their width W.
        samples: Batch size B.
        sequence_length: Tokens S of one sample.
        outcome: Whether it could be trained on.
        seconds: Compute time of forward and backward, without waits: the lower quartile of the repeats, the
            median of the ranks. What disturbs a step on its host only makes it longer.
        spread: (slowest - fastest) over that quartile, the largest of the ranks.
        wait_seconds: Time at synchronisation with other ranks, the median of both.
        peak_bytes: Highest memory in use of all ranks, beside gradients of the step's earlier micro-batches, and
            what CUDA graphs keep; None where it cannot be measured.
        by_graph: Whether the network ran by CUDA graphs on all ranks.
        first_peak_bytes: As `peak_bytes`, of the first micro-batch of a step, see `Measurement`.
        start_bytes: As `first_peak_bytes`, before it has gradients of its own.
    """

    frames: int
    height: int
    width: int
    samples: int
    sequence_length: int
    outcome: RowOutcome = "measured"
    seconds: float | None = None
    spread: float | None = None
    wait_seconds: float | None = None
    peak_bytes: float | None = None
    by_graph: bool = False
    first_peak_bytes: float | None = None
    start_bytes: float | None = None


@dataclass(frozen=True)
class ShapeMatrix:
    """The rows of a benchmark and what they hold for.

    Attributes:
        rows: In the order in which they were measured.
        provenance: Versions, device, strategy, precision, module: what two matrices must share to be comparable. Of
            these, `differences` compares those that decide over time and memory.
        capacity_bytes: Memory that a process could use, the least of all ranks; None where there is no such limit.
    """

    rows: tuple[MatrixRow, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    capacity_bytes: float | None = None

    @property
    def measurements(self) -> list[Measurement]:
        """What `StepTimeModel.fit` and `MemoryModel.fit` take."""
        return [
            Measurement(
                row.samples,
                row.sequence_length,
                row.seconds,
                row.peak_bytes,
                by_graph=row.by_graph,
                first_peak_bytes=row.first_peak_bytes,
                start_bytes=row.start_bytes,
            )
            for row in self.rows
            if row.outcome == "measured" and row.seconds is not None
        ]

    def within_memory(self, tokens: float, reserve: float, overhead_tokens: float = 0.0) -> float:
        """Bounds what peaks leave room for: those are of tensors, and gaps and libraries take memory too.

        Args:
            tokens: B * (S + overhead) that a micro-batch may have.
            reserve: Share to stay below the smallest micro-batch that was out of memory.
            overhead_tokens: What a sample takes beside its tokens, in tokens.

        Returns:
            As many, or what lies below that micro-batch; at least 1.
        """
        full = [r.samples * (r.sequence_length + overhead_tokens) for r in self.rows if r.outcome == "out_of_memory"]
        if not full or tokens < min(full):
            return tokens
        return max(1, min(int(min(full) * (1 - reserve)), min(full) - 1))

    def differences(self, provenance: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """What a run differs in from the one that was measured, as ``name: then, now``."""
        return differences(self.provenance, provenance, names)

    def save(self, file: str | Path) -> None:
        """Writes the matrix as JSON; whoever reads meanwhile, or after this process was killed, finds it whole."""
        content = {
            "format": _FORMAT,
            "provenance": dict(self.provenance),
            "capacity_bytes": self.capacity_bytes,
            "rows": [asdict(row) for row in self.rows],
        }
        file = local(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)

    @classmethod
    def load(cls, file: str | Path) -> ShapeMatrix:
        """Reads what `save` wrote.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is no matrix, or one of another format, or has numbers that nobody can have measured.
        """
        try:
            content = json.loads(local(file).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, this release reads {_FORMAT}")
            rows, provenance, capacity = content["rows"], content["provenance"], content["capacity_bytes"]
            if not isinstance(provenance, dict) or not _is_amount(capacity):
                raise ValueError(f"provenance={provenance!r} and capacity_bytes={capacity!r} are no names and bytes")
            if not _is_count(size := provenance.get("sequence_parallel_size", 1)):
                raise ValueError(f"sequence_parallel_size={size!r} is no number of ranks")
            return cls(tuple(_row(MatrixRow(**row)) for row in rows), provenance, capacity)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no matrix of `videoscale benchmark-shapes`: {error}.") from error


def _row(row: MatrixRow) -> MatrixRow:
    """Returns a row of a file, which somebody may have edited: text for a number would be multiplied as text."""
    counts = _is_count(row.samples) and _is_count(row.sequence_length)
    amounts = all(map(_is_amount, (row.seconds, row.peak_bytes, row.first_peak_bytes, row.start_bytes)))
    if not (counts and amounts and row.outcome in get_args(RowOutcome)):
        raise ValueError(f"{row} has other numbers than positive ones, or an outcome not of {get_args(RowOutcome)}")
    return row


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_amount(value: Any) -> bool:
    """Whether it is seconds or bytes, or that there are none."""
    return value is None or (type(value) in (int, float) and 0 < value < math.inf)


def differences(then: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What differs, of some names, between where something was measured and where it is to hold."""
    return [
        f"{name}: {then.get(name)!r} measured, {now.get(name)!r} now"
        for name in names
        if then.get(name) != now.get(name)
    ]
