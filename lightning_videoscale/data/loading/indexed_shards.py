"""The shards that a DataModule was given: which files they are, their one index, and readers of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.data.loading.data_warnings import (
    check_caption_key,
    warn_of_captions,
    warn_of_ignored,
    warn_of_refused,
)
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning.shapes import Clips
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex, default_index_file
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.shards.patterns import Patterns, expand_each

Shards = Patterns | dict[str, float]
"""A path or pattern of tar files, a list of them, or several datasets: pattern by pattern with its weight."""


class IndexedShards:
    """Tar files to train, to validate and to predict on, in one table of samples that is cut by argument.

    Args:
        train: What ``shards`` is.
        others: Further arguments by name, ``val_shards`` and ``predict_shards``; None where there are none.
        index_file: Where the table is kept. None: beside the first shard.
        caption_key: Field of ``.json`` that holds the captions; see `find_caption`.

    Raises:
        ValueError: If a dataset's weight is not a positive number.

    Attributes:
        weights: What each dataset to train on is drawn with, by its pattern; None unless ``train`` tells.
    """

    def __init__(
        self,
        train: Shards,
        others: Mapping[str, Patterns | None],
        index_file: str | Path | None,
        caption_key: str | None = None,
    ) -> None:
        self.weights = train if isinstance(train, dict) else None
        for name, weight in (self.weights or {}).items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"The dataset {name!r} has the weight {weight}; it must be a positive number. Leave out what is "
                    "not to be trained on."
                )
        self._patterns: dict[str, Patterns] = {"shards": list(train) if isinstance(train, dict) else train}
        self._patterns |= {name: patterns for name, patterns in others.items() if patterns is not None}
        self._index_file = index_file
        self._caption_key = caption_key
        self._listed: dict[str, list[list[str]]] = {}
        self._parts: dict[str, tuple[ShardIndex, MicroBatchReader]] = {}
        self._versions: list[tuple[str, int, str]] = []

    @property
    def file(self) -> Path:
        """Where the table is kept."""
        return default_index_file(self._files) if self._index_file is None else Path(self._index_file)

    def build(self, workers: int) -> None:
        """Looks at what the kept table does not know yet, and keeps it; a warning where it cannot be kept.

        Args:
            workers: Processes that look.
        """
        self._list()
        try:
            build_index(self._files, self.file, workers=workers, progress=True, caption_key=self._caption_key)
        except OSError as error:
            rank_zero_warn(f"The shard index cannot be kept ({error}), so every rank reads the shards. Give `index=`.")

    def read(self, fps: float) -> bool:
        """Reads the table, and says what of the shards is left alone.

        Args:
            fps: Frames per second at which videos are read.

        Returns:
            Whether it differs from what was read before.

        Raises:
            ShardError: If there are no samples for an argument, or a shard cannot be read.
        """
        self._list()
        index = index_shards(self._files, known_shards(self.file), caption_key=self._caption_key)
        versions = [(shard.url, shard.size, shard.stamp) for shard in index.shards]
        if versions == self._versions:
            return False
        index.check()
        check_caption_key(index, self._caption_key)
        begin = 0
        for name, listed in self._listed.items():
            end = begin + sum(map(len, listed))
            part = ShardIndex(index.shards[begin:end])
            if not len(part):
                raise ShardError(f"No samples found in {name}.")
            self._parts[name] = part, MicroBatchReader(part, fps)
            begin = end
        warn_of_refused(index)
        warn_of_ignored(index)
        warn_of_captions(index)
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
        sources = [number for number, files in enumerate(self._listed[argument]) for _ in files]
        return replace(index.samples.clips, source=np.array(sources, np.int32)[index.shard_numbers])

    def _part(self, argument: str) -> tuple[ShardIndex, MicroBatchReader]:
        if argument not in self._parts:
            raise RuntimeError(
                f"VideoDataModule has no index of its {argument}: give {argument}= and, without a Trainer, call "
                "prepare_data() and setup('fit') first."
            )
        return self._parts[argument]

    def _list(self) -> None:
        """Lists the files of each pattern as they are now."""
        self._listed = {name: expand_each(patterns) for name, patterns in self._patterns.items()}

    @property
    def _files(self) -> list[str]:
        if not self._listed:
            self._list()
        return [file for listed in self._listed.values() for files in listed for file in files]
