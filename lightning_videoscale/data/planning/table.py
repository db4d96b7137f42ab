"""What the planner knows of the samples: numbers, and nothing of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.planning.shapes import Clips, ClipShape, ShapePolicy, TablePart


@dataclass(frozen=True)
class SampleTable:
    """N samples.

    Attributes:
        shapes: The different shapes after all transformations.
        sequence_lengths: (shapes,) int64, tokens S of one sample of each.
        shape_id: (N,) integers, each sample's shape; -1 leaves a sample out.
        shard: (N,) integers, the shard that holds it; samples of one shard are read together.
        source: (N,) integers, the dataset that it belongs to, for mixing.
        start: (N,) float64, second at which reading a clip begins.
        rows: (N,) ascending, the number of each sample in the index, where the table is a part of it; None: its place.
    """

    shapes: tuple[ClipShape, ...]
    sequence_lengths: NDArray[np.int64]
    shape_id: NDArray[np.int32]
    shard: NDArray[np.int32]
    source: NDArray[np.int32]
    start: NDArray[np.float64]
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.sequence_lengths):
            raise ValueError(f"{len(self.shapes)} shapes and {len(self.sequence_lengths)} sequence lengths.")
        if len({len(column) for column in (self.shape_id, self.shard, self.source, self.start)}) > 1:
            raise ValueError("The columns of a SampleTable must have equally many rows.")

    @classmethod
    def create(
        cls,
        shapes: Sequence[ClipShape],
        sequence_lengths: NDArray[np.int64],
        shape_id: NDArray[np.int32],
        shard: NDArray[np.int32] | None = None,
        source: NDArray[np.int32] | None = None,
        start: NDArray[np.float64] | None = None,
    ) -> SampleTable:
        """A table whose samples lie in one shard of one dataset and begin at 0, where nothing else is said."""
        zeros = np.zeros(len(shape_id), np.int32)
        return cls(
            shapes=tuple(shapes),
            sequence_lengths=np.asarray(sequence_lengths, np.int64),
            shape_id=np.asarray(shape_id, np.int32),
            shard=zeros if shard is None else shard,
            source=zeros if source is None else source,
            start=zeros.astype(np.float64) if start is None else start,
        )

    @classmethod
    def of_clips(
        cls,
        clips: Clips,
        policy: ShapePolicy,
        geometry: ModelGeometry,
        seed: int = 0,
        shard: NDArray[np.int32] | None = None,
        epoch: int = 0,
        part: TablePart | None = None,
    ) -> SampleTable:
        """The samples in the shapes that they are trained in.

        Args:
            clips: What they are before.
            policy: Says which shape each gets.
            geometry: Says how many tokens that is.
            seed: Seed of the policy's draws.
            shard: (N,) numbers of their shards; None: one.
            epoch: Every epoch draws anew.
            part: Which samples of a larger table these are, with the draws that they have there; None: they are all.

        Raises:
            ValueError: If latents cannot be cut into whole patches.
        """
        shaped = policy.shape(clips, geometry, seed, epoch, part)
        frames, height, width, latents = np.array(shaped.shapes, np.int64).reshape(-1, 4).T
        lengths = geometry.sequence_length(frames, height, width, latents=latents.astype(bool))
        table = cls.create(shaped.shapes, lengths, shaped.shape_id, shard, clips.source, shaped.start)
        return table if part is None else replace(table, rows=part.rows)

    def __len__(self) -> int:
        return len(self.shape_id)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers in the index of some rows of this table."""
        return rows if self.rows is None else self.rows[rows]

    def samples_by_length(self) -> dict[int, int]:
        """Returns how many samples there are by their tokens; those that are left out are none."""
        lengths = self.sequence_lengths[self.shape_id[self.shape_id >= 0]]
        return {int(tokens): int(count) for tokens, count in zip(*np.unique(lengths, return_counts=True), strict=True)}
