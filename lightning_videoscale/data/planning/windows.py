"""An epoch in windows: as much of its stream at a time as memory shall hold.

A window is some consecutive draws of the epoch's stream, and the draws that the window before has left over. It is
planned as an epoch is, but for its end: micro-batches that make no whole step are carried into the next window. So what
a window trains on follows from its number of draws, from what it carries, and from nothing else of the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.planning.lazy_stream import LazyStream, spans
from lightning_videoscale.data.planning.shapes import Clips, ShapePolicy, TablePart
from lightning_videoscale.data.planning.table import SampleTable

_AT_ONCE = 250_000
"""Clips that are looked at together where all of them are."""


class Window(NamedTuple):
    """A part of an epoch.

    Attributes:
        first: Its first draw in the epoch's stream.
        last: The draw behind its last.
        total: Draws of the epoch.
        carried: (n,) ascending, draws before ``first`` that are to be planned with it.
    """

    first: int
    last: int
    total: int
    carried: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def draws(self) -> NDArray[np.int64]:
        """Places in the epoch's stream, in order."""
        return np.concatenate([self.carried, np.arange(self.first, self.last)])

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with it."""
        return self.last >= self.total


class ManyClips(Protocol):
    """Clips in shards, of which some are looked at a time."""

    def clips_at(self, rows: NDArray[np.int64]) -> Clips:
        """Returns what is known of some ascending clips."""


class WindowContent(NamedTuple):
    """What of a window is planned: its samples, each once, and (draws,) the row of the table that each draw is."""

    table: SampleTable
    stream: NDArray[np.int64]


class _Seen(NamedTuple):
    """What is known of all clips.

    Attributes:
        usable: (shards,) how many of each shard can be trained on.
        longest: The clip of most tokens in the first epoch, (1,); none where none can be trained on.
    """

    usable: NDArray[np.int64]
    longest: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EpochWindows:
    """Cuts epochs into windows, and reads of the clips what a window needs.

    Args:
        size: Draws of a window at most, beside those that it carries.
        clips: All clips, one shard after the other.
        shard_ends: (shards,) int64, how many clips there are up to the end of each shard.
        source: (shards,) the dataset of each shard.
        policy: Says which shape each clip gets.
        geometry: Says how many tokens that is.
        seed: Seed of all draws.
        shard_window: Shards that samples are shuffled over at a time.
        weights: Weight per dataset; None draws every sample once per epoch.

    Raises:
        ValueError: When clips are first asked for, if latents cannot be cut into whole patches, or nothing can be drawn
            of a dataset.
    """

    size: int
    clips: ManyClips
    shard_ends: NDArray[np.int64]
    source: NDArray[np.int32]
    policy: ShapePolicy
    geometry: ModelGeometry
    seed: int = 0
    shard_window: int = 64
    weights: Sequence[float] | None = None

    def first(self) -> Window:
        """The first window of an epoch."""
        return self._from(0, np.empty(0, np.int64))

    def after(self, window: Window, left: NDArray[np.int64]) -> Window:
        """The window that follows one.

        Args:
            window: Not the last of its epoch.
            left: What of the window's draws is to be carried, by their places in `Window.draws`.
        """
        return self._from(window.last, window.draws[left])

    def content(self, epoch: int, window: Window) -> WindowContent:
        """Reads what a window holds."""
        drawn = self._stream.rows(epoch, window.draws)
        rows, stream = np.unique(drawn, return_inverse=True)
        return WindowContent(self._table(epoch, rows), stream)

    @cached_property
    def sample(self) -> SampleTable:
        """The first window of the first epoch and the longest clip of that epoch, for what asks how clips are.

        Shards are shuffled, so a window is a fair sample of them. But the longest clip is rare, and memory must do for
        it.
        """
        drawn = self._stream.rows(0, self.first().draws)
        return self._table(0, np.union1d(drawn, self._seen.longest))

    @property
    def count(self) -> int:
        """How many windows an epoch has."""
        return max(1, -(-self._stream.draws // self.size))

    @property
    def total(self) -> int:
        """How many clips there are."""
        return int(self.shard_ends[-1])

    @property
    def usable(self) -> NDArray[np.int64]:
        """(shards,) clips of each shard that can be trained on."""
        return self._seen.usable

    @property
    def unusable(self) -> int:
        """How many clips cannot be trained on."""
        return self.total - int(self.usable.sum())

    @property
    def first_unusable(self) -> int:
        """The first such clip; there must be one."""
        begins = self._shard_begins
        shard = int(np.argmax(self.shard_ends - begins > self.usable))
        rows = np.arange(begins[shard], self.shard_ends[shard])
        return int(rows[np.argmin(self.policy.is_usable(self.clips.clips_at(rows), self.geometry))])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(datasets,) how many samples of each dataset can be trained on."""
        return self._stream.sizes

    @cached_property
    def _seen(self) -> _Seen:
        """All clips are looked at, some at a time."""
        usable, longest, most = np.zeros(len(self.shard_ends), np.int64), np.empty(0, np.int64), 0
        for begin in range(0, self.total, _AT_ONCE):
            rows = np.arange(begin, min(begin + _AT_ONCE, self.total))
            clips = self.clips.clips_at(rows)
            shards = np.searchsorted(self.shard_ends, rows[self.policy.is_usable(clips, self.geometry)], side="right")
            usable += np.bincount(shards, minlength=len(usable))
            table = self._shaped(0, rows, clips)
            if (tokens := int(table.sequence_lengths.max(initial=0))) > most:
                shape = int(table.sequence_lengths.argmax())
                longest, most = rows[[np.argmax(table.shape_id == shape)]], tokens
        return _Seen(usable, longest)

    @cached_property
    def _stream(self) -> LazyStream:
        return LazyStream(self.usable, self.source, self._usable_of, self.seed, self.shard_window, self.weights)

    def _usable_of(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the clips of some ascending shards that can be trained on."""
        begins = self._shard_begins[shards]
        rows = spans(begins, self.shard_ends[shards] - begins)
        if len(rows) == self.usable[shards].sum():
            return rows
        return rows[self.policy.is_usable(self.clips.clips_at(rows), self.geometry)]

    def _table(self, epoch: int, rows: NDArray[np.int64]) -> SampleTable:
        return self._shaped(epoch, rows, self.clips.clips_at(rows))

    def _shaped(self, epoch: int, rows: NDArray[np.int64], clips: Clips) -> SampleTable:
        """Some ascending clips, in the shapes that they have in an epoch."""
        part = TablePart(rows, self.total)
        return SampleTable.of_clips(clips, self.policy, self.geometry, self.seed, epoch=epoch, part=part)

    @cached_property
    def _shard_begins(self) -> NDArray[np.int64]:
        return np.concatenate([[0], self.shard_ends[:-1]]).astype(np.int64)

    def _from(self, first: int, carried: NDArray[np.int64]) -> Window:
        """The window from a draw on. What is left of an epoch is cut evenly: the last window is no short one."""
        total = self._stream.draws
        windows = max(1, -(-(total - first) // self.size))
        return Window(first, first + -(-(total - first) // windows), total, carried)
