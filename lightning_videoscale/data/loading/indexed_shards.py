"""The shards that a DataModule was given: which files they are, their one index, and readers of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.loading.data_warnings import (
    check_caption_key,
    warn_of_captions,
    warn_of_ignored,
    warn_of_missing_embeds,
    warn_of_refused,
)
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.loading.shard_versions import shared_versions
from lightning_videoscale.data.packing.on_the_way import Found, already_packed, pack_on_the_way
from lightning_videoscale.data.planning.shapes import Clips, ShapePolicy
from lightning_videoscale.data.planning.windows import EpochWindows
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.shards.patterns import Patterns
from lightning_videoscale.user_paths import on_disk

Shards = Patterns | dict[str, float]
"""A path or pattern of tar files, a folder of videos, a list of them, or several datasets: each with its weight."""


class IndexedShards:
    """Tar files to train, to validate and to predict on, in one table of samples that is cut by argument.

    Args:
        train: What ``shards`` is.
        others: Further arguments by name, ``val_shards`` and ``predict_shards``; None where there are none.
        index_file: Where the table is kept. None: beside the first shard.
        caption_key: Field of ``.json`` that holds the captions; see `find_caption`.
        captions: Table of captions of the folders of videos among them; see `pack_on_the_way`.

    Raises:
        ValueError: If a dataset's weight is not a positive number, others have weights, or a table is behind a URL.

    Attributes:
        weights: What each dataset to train on is drawn with, by its pattern; None unless ``train`` tells.
    """

    def __init__(
        self,
        train: Shards,
        others: Mapping[str, Shards | None],
        index_file: str | Path | None,
        caption_key: str | None = None,
        captions: str | Path | None = None,
    ) -> None:
        self.weights = train if isinstance(train, dict) else None
        for name, weight in (self.weights or {}).items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"The dataset {name!r} has the weight {weight}; it must be a positive number. Leave out what is "
                    "not to be trained on."
                )
        self._patterns: dict[str, Patterns] = {"shards": _listed(train)}
        self._patterns |= {name: _unweighted(name, given) for name, given in others.items() if given is not None}
        self._index_file = None if index_file is None else on_disk(index_file, "index")
        self._caption_key = caption_key
        self._captions = None if captions is None else on_disk(captions, "captions")
        self._found: Found | None = None
        self._parts: dict[str, tuple[ShardIndex, MicroBatchReader]] = {}
        self._versions: list[tuple[str, int, str]] = []

    @property
    def file(self) -> Path:
        """Where the table is kept; folders that are not packed yet are packed to know it."""
        if self._index_file is not None:
            return self._index_file
        return (self._found or self._pack(workers=1)).index_file

    def build(self, workers: int) -> None:
        """Packs folders, looks by worker processes at what the kept table lacks, and keeps it, or warns."""
        found = self._pack(workers)
        try:
            build_index(found.distinct, self.file, workers=workers, progress=True, caption_key=self._caption_key)
        except OSError as error:
            rank_zero_warn(f"The shard index cannot be kept ({error}), so every rank reads the shards. Give `index=`.")

    def read(self, fps: float, trainer: pl.Trainer | None) -> bool:
        """Reads the table, and says what of the shards is left alone; collective over the ranks of a Trainer.

        Args:
            fps: Frames per second at which videos are read.
            trainer: Whose ranks read it.

        Returns:
            Whether it differs from what was read before.

        Raises:
            ShardError: If there are no samples for an argument, a folder is not packed, or a shard cannot be read.
        """
        self._found = already_packed(list(self._patterns.values()), self._captions)
        now = shared_versions(trainer, self._found.shards)
        known = known_shards(self.file)
        index = index_shards(self._found.shards, known, caption_key=self._caption_key, versions=now)
        versions = [(shard.url, shard.size, shard.stamp) for shard in index.shards]
        if versions == self._versions:
            return False
        index.check()
        check_caption_key(index, self._caption_key)
        begin = 0
        for name, listed in zip(self._patterns, self._found.groups, strict=True):
            end = begin + sum(map(len, listed))
            part = ShardIndex(index.shards[begin:end])
            if not len(part):
                raise ShardError(f"No samples found in {name}.")
            self._parts[name] = part, MicroBatchReader(part, fps)
            begin = end
        warn_of_refused(index)
        warn_of_ignored(index)
        warn_of_captions(index)
        warn_of_missing_embeds(index)
        self._versions = versions
        return True

    @property
    def arguments(self) -> list[str]:
        """The arguments that samples were found for; none before the table is read."""
        return list(self._parts)

    def index(self, argument: str) -> ShardIndex:
        """The part of the table of an argument.

        Raises:
            RuntimeError: If there is no such argument, or the table has not been read.
        """
        return self._part(argument)[0]

    def reader(self, argument: str) -> MicroBatchReader:
        """Reads the samples of an argument; raises as `index` does."""
        return self._part(argument)[1]

    def clips(self, argument: str) -> Clips:
        """The samples of an argument, those to train on with the number of the dataset that they are of."""
        index = self.index(argument)
        if argument != "shards" or self.weights is None:
            return index.samples.clips
        return replace(index.samples.clips, source=self.sources(argument)[index.shard_numbers])

    def windows(
        self, size: int, policy: ShapePolicy, geometry: ModelGeometry, seed: int, shard_window: int
    ) -> EpochWindows:
        """Cuts the epochs of the samples to train on into windows of so many draws; see `EpochWindows`."""
        index, sources = self.index("shards"), self.sources("shards")
        weights = None if self.weights is None else tuple(self.weights.values())
        ends = index.shard_ends
        return EpochWindows(size, index.samples, ends, sources, policy, geometry, seed, shard_window, weights)

    def sources(self, argument: str) -> NDArray[np.int32]:
        """(shards,) the number of the dataset that each shard of an argument is of; 0 where there is but one."""
        if argument != "shards" or self.weights is None:
            return np.zeros(len(self.index(argument).shards), np.int32)
        assert self._found is not None  # the table has been read
        listed = self._found.groups[list(self._patterns).index(argument)]
        return np.array([number for number, files in enumerate(listed) for _ in files], np.int32)

    def _part(self, argument: str) -> tuple[ShardIndex, MicroBatchReader]:
        if argument not in self._parts:
            raise RuntimeError(
                f"VideoDataModule has no index of its {argument}: give {argument}= and, without a Trainer, call "
                "prepare_data() and setup('fit') first."
            )
        return self._parts[argument]

    def _pack(self, workers: int) -> Found:
        """Lists the files of each pattern as they are now, and packs the folders among them."""
        groups = list(self._patterns.values())
        self._found = pack_on_the_way(groups, self._captions, say=rank_zero_info, workers=workers)
        return self._found


def _unweighted(argument: str, shards: Shards) -> Patterns:
    """Raises ValueError if shards of which every sample is read once were given weights."""
    if isinstance(shards, dict):
        raise ValueError(
            f"{argument}={shards!r} has weights, and of these shards every sample is read once: name them in a list, "
            f"{argument}={list(shards)!r}."
        )
    return _listed(shards)


def _listed(shards: Shards) -> Patterns:
    """Patterns that can be walked through more than once, which those of `Path.glob` cannot."""
    return shards if isinstance(shards, (str, Path)) else list(shards)
