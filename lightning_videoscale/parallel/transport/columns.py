"""Columns of a matrix that come from several ranks, put beside each other once they have come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.words import by_words


class CopiedColumns:
    """See `ColumnExchange`; sent by an all-to-all of a transport, as `Transport.begin_columns` describes."""

    def __init__(
        self, transport: Any, columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis
    ) -> None:
        check_columns(columns, lengths, widths, axis)
        rows, samples, mine = lengths[axis.rank], *columns.shape[1:]
        send, receive = [n * samples * mine for n in lengths], [rows * samples * width for width in widths]
        self._transport, self._pending = transport, transport.all_to_all(columns.flatten(), send, receive, axis)
        self._join = partial(beside_each_other, rows, samples)

    def wait(self, *, keep: bool = False) -> Tensor:
        """See `ColumnExchange`; memory of its own in any case."""
        matrix: Tensor = self._transport.wait(self._pending, self._join)
        return matrix

    def done(self) -> None:
        """Does nothing."""


def beside_each_other(rows: int, samples: int, pieces: Sequence[Tensor]) -> Tensor:
    """Returns (samples, rows, all columns) of pieces that are (rows, samples, columns), flat."""
    return by_words(partial(torch.cat, dim=2), [piece.view(rows, samples, -1).transpose(0, 1) for piece in pieces])


def check_columns(columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis) -> None:
    """Refuses columns that are not as `Transport.begin_columns` says.

    Raises:
        ValueError: If they are not contiguous, or not as many as said.
    """
    shape = sum(lengths), columns.shape[1], widths[axis.rank]
    if not columns.is_contiguous() or columns.shape != shape:
        raise ValueError(
            f"Columns must be contiguous and of the shape {shape}; these have the shape {tuple(columns.shape)} and the "
            f"strides {columns.stride()}."
        )
