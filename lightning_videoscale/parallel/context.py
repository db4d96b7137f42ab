"""What the layers of a split model share: the mesh, the transport, and how long each rank's slice is.

`SplitRecord`      how one forward pass was split; never changed once made
`SequenceContext`  mesh and transport of one model, and the record of the pass that is computed now
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.region_randomness import RegionRandomness, RegionSeed
from lightning_videoscale.parallel.transport import DEFAULT_TRANSPORT, Transport


@dataclass(frozen=True)
class SplitRecord:
    """How one forward pass was split, which spares its layers the exchange of sizes.

    Made by the splits of the pass, and kept in the autograd graph by its gathers (see `sharding.gather`).

    Attributes:
        rank: This rank's position in the group that shares the sequence.
        tables: Of each sequence that was split, the tokens of all ranks; ``table[r]`` of them on rank ``r``.
        seed: Of the random numbers between the first split and the last gather; None before the first split.
    """

    rank: int
    tables: tuple[tuple[int, ...], ...] = ()
    seed: RegionSeed | None = None

    def with_table(self, lengths: tuple[int, ...]) -> SplitRecord:
        """Returns the record that also holds a sequence of ``lengths[r]`` tokens on rank ``r``.

        Raises:
            RuntimeError: If two sequences of different total length gave this rank slices of equal length.
        """
        local = lengths[self.rank]
        known = next((table for table in self.tables if table[self.rank] == local), None)
        if known is None:
            return replace(self, tables=(*self.tables, lengths))
        if known != lengths:
            raise RuntimeError(
                f"Two sequences of {sum(known)} and {sum(lengths)} tokens both gave this rank {local} tokens, so a "
                "layer cannot tell them apart. Pad one of them to a multiple of the sequence-parallel size."
            )
        return self

    def lengths_of(self, local_length: int) -> tuple[int, ...]:
        """Returns the tokens of all ranks of the sequence of which this rank holds ``local_length``.

        Raises:
            RuntimeError: If no split of the pass gave this rank a slice of that length.
        """
        for table in self.tables:
            if table[self.rank] == local_length:
                return table
        raise RuntimeError(
            f"No tensor of this forward pass was split into {local_length} tokens for this rank (known: "
            f"{sorted(self.local_lengths)}). The split plan of the model lacks an input that reaches this layer."
        )

    @property
    def local_lengths(self) -> set[int]:
        """Tokens of this rank's slices."""
        return {table[self.rank] for table in self.tables}


class SequenceContext:
    """Shared by the split, the attention layers and the gather of one model.

    Args:
        mesh: The mesh of ranks.
        transport: How bytes travel; collectives if left out.

    Attributes:
        record: Of the forward pass whose layers run now, for the first time or recomputed in backward. It is replaced
            when a pass begins, by each of its splits, and when backward comes to what a pass has gathered.
        randomness: The random numbers between the first split and the last gather.
        in_forward: Whether the model's forward runs; layers that run otherwise are recomputed for backward.
        suspended: Whether the model runs whole for now, as if it had never been split.
        on_split: Told of every slice that a split returns, while the model is watched.
        network: Weak reference to the model that ran last: this context's, or a copy of it.
    """

    def __init__(self, mesh: SequenceMesh, transport: Transport | None = None) -> None:
        self.mesh = mesh
        self.transport = transport if transport is not None else DEFAULT_TRANSPORT
        self.record = SplitRecord(mesh.sp.rank)
        self.randomness = RegionRandomness(mesh.sp.rank)
        self.in_forward = False
        self.suspended = False
        self.on_split: Callable[[Tensor], None] | None = None
        self.network: Callable[[], nn.Module | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceContext:
        """Itself: a copy of a model (an average, a teacher) keeps its hooks, and is split as one more call would be."""
        return self

    def begin_forward(self) -> None:
        """A new forward pass, of which nothing is split yet."""
        self.randomness.leave()  # which a pass that was interrupted has not
        self.record = SplitRecord(self.mesh.sp.rank)
        self.in_forward = True

    def end_forward(self) -> None:
        """The end of the forward pass, also by an exception; its record stays for `gather_sequence`."""
        self.randomness.leave()
        self.in_forward = False

    def enter_region(self, x: Tensor) -> None:
        """Begins this rank's random numbers before ``x`` is split; those of the first time where that is recomputed."""
        if self.in_forward:
            seed = self.randomness.enter(x.device)
            if seed is not None:
                self.record = replace(self.record, seed=seed)
        elif self.record.seed is not None:
            self.randomness.enter_again(x.device, self.record.seed)

    def resume(self, record: SplitRecord) -> None:
        """Backward has come to a forward pass, whose layers may be recomputed from here on."""
        self.record = record

    def lengths_of(self, local_length: int) -> tuple[int, ...]:
        """As `SplitRecord.lengths_of`, of the pass whose layers run now."""
        return self.record.lengths_of(local_length)
