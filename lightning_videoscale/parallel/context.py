"""What the layers of a split model share: the mesh, the transport, and how long each rank's slice is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.transport import Transport


class SequenceContext:
    """Shared by the split, the attention layers and the gather of one model.

    The split tables are recorded by the splits of a forward pass and read by its attention layers and its gather, so
    that no layer exchanges sizes. They are keyed by the local length, all that a layer deep in the model knows.

    Args:
        mesh: The mesh of ranks.
        transport: How bytes travel.

    Attributes:
        suspended: Whether the model runs whole for now, as if it had never been split.
        on_split: Told of every slice that a split returns, while the model is watched.
    """

    def __init__(self, mesh: SequenceMesh, transport: Transport) -> None:
        self.mesh = mesh
        self.transport = transport
        self.suspended = False
        self.on_split: Callable[[Tensor], None] | None = None
        self._tables: dict[int, tuple[int, ...]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceContext:
        """Itself: a copy of a model (an average, a teacher) keeps its hooks, and is split as one more call would be."""
        return self

    @property
    def tables(self) -> Mapping[int, tuple[int, ...]]:
        """A snapshot of the split tables, for `restore`."""
        return dict(self._tables)

    def begin_forward(self) -> None:
        """Forgets the split tables of the previous forward pass."""
        self._tables = {}

    def restore(self, tables: Mapping[int, tuple[int, ...]]) -> None:
        """Brings back the split tables of the forward pass whose backward starts."""
        self._tables = dict(tables)

    def record(self, lengths: tuple[int, ...]) -> None:
        """Notes how a sequence of this forward pass was split: ``lengths[r]`` tokens on rank ``r`` of the group.

        Raises:
            RuntimeError: If two sequences of different total length gave this rank slices of equal length.
        """
        local = lengths[self.mesh.sp.rank]
        known = self._tables.setdefault(local, lengths)
        if known != lengths:
            raise RuntimeError(
                f"Two sequences of {sum(known)} and {sum(lengths)} tokens both gave this rank {local} tokens, so a "
                "layer cannot tell them apart. Pad one of them to a multiple of the sequence-parallel size."
            )

    def lengths_of(self, local_length: int) -> tuple[int, ...]:
        """Returns how the sequence was split of which this rank holds ``local_length`` tokens.

        Raises:
            RuntimeError: If no split of this forward pass gave this rank a slice of that length.
        """
        try:
            return self._tables[local_length]
        except KeyError:
            raise RuntimeError(
                f"No tensor of this forward pass was split into {local_length} tokens for this rank (known: "
                f"{sorted(self._tables)}). The split plan of the model lacks an input that reaches this layer."
            ) from None
