"""Which micro-batches a benchmark measures: few, spread over what training will see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, int, int, bool]
"""Frames, height and width of what is read, and whether that is latents."""

TrainingBatch = dict[str, Any]
"""What the training step receives."""

LONG = 20_000
"""Tokens from which on a sequence gets more batch sizes (AdaptiveLoad's throughput sweep)."""

_SWEEP = (1, 2, 3, 4, 6, 8)


class Cell(NamedTuple):
    """A micro-batch to measure: B samples of a shape, of S tokens each."""

    shape: Shape
    sequence_length: int
    samples: int

    @property
    def tokens(self) -> int:
        """B * S."""
        return self.samples * self.sequence_length


SyntheticBatches = Callable[[Cell], TrainingBatch]
"""Makes what the training step receives of a cell, in host memory, the same on every rank."""


def spread_over_shapes(
    shapes: Sequence[Shape],
    sequence_lengths: Sequence[int],
    max_shapes: int = 12,
    max_tokens: int | None = None,
) -> list[Cell]:
    """Chooses shapes evenly over the logarithm of their length, the shortest and the longest among them.

    Short sequences are measured alone, in batches that grow fourfold, and in the largest that may be: what they cost
    beside their tokens shows in the small ones, and in training they come in large ones. Sequences of `LONG` tokens
    and more, whose micro-batches decide how long a step takes, are measured in 1, 2, 3, 4, 6 and 8.

    Args:
        shapes: The shapes of the data.
        sequence_lengths: Tokens of one sample of each.
        max_shapes: Sequence lengths to measure at most.
        max_tokens: Tokens B * S to measure at most; None: those of two samples of the longest shape.

    Returns:
        Cells by rising tokens. One sample of every chosen shape is among them, whatever ``max_tokens`` says.

    Raises:
        ValueError: If there is no shape, or fewer than 2 lengths may be measured.
    """
    if not len(shapes) or max_shapes < 2:
        raise ValueError(f"A grid needs shapes and max_shapes >= 2; got {len(shapes)} shapes, max_shapes={max_shapes}.")
    by_length = dict(sorted({int(s): shape for shape, s in zip(shapes, sequence_lengths, strict=True)}.items()))
    lengths = np.array(list(by_length), np.float64)
    wanted = np.geomspace(lengths[0], lengths[-1], min(max_shapes, len(lengths)))
    chosen = sorted({int(lengths[np.argmin(np.abs(np.log(lengths / s)))]) for s in wanted})
    limit = 2 * chosen[-1] if max_tokens is None else int(max_tokens)  # 2e5 is a number of tokens as well
    cells = [Cell(by_length[s], s, b) for s in chosen for b in _batch_sizes(s, limit // s, s >= LONG)]
    return sorted(cells, key=lambda cell: (cell.tokens, cell.sequence_length))


def _batch_sizes(sequence_length: int, most: int, is_long: bool) -> list[int]:
    if is_long:
        return [b for b in _SWEEP if b <= max(1, most)]
    most = max(1, most)
    return [*(4**k for k in range(32) if 2 * 4**k <= most), most]
