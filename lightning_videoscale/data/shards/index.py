"""The table of all samples: what each is, its true shape, and where its members lie.

Planning needs every shape before the first sample is read, so the shards are looked at once and the table is kept, see
`IndexTable`. A shard that has changed since (size, modification time or ETag) is looked at again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index_table import SUFFIX, IndexTable, TableWriter
from lightning_videoscale.data.shards.location import identities, is_remote, short_names
from lightning_videoscale.data.shards.samples import Samples
from lightning_videoscale.data.shards.shard_entry import ShardEntry, update_contents
from lightning_videoscale.data.shards.tars import Refusal

_SHOWN = 20
_NAMED = "videoscale-index-"
CACHE = Path("~/.cache/lightning-videoscale")
"""Where the index of remote shards is kept."""


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """All samples of some shards, in a fixed order: sample i is ``samples[i]`` in the shard ``shard_of(i)``."""

    shards: tuple[ShardEntry, ...]

    @classmethod
    def load(cls, file: Path) -> ShardIndex:
        """Reads what `save` or an older release wrote.

        Args:
            file: Its name, see `IndexTable`.

        Raises:
            FileNotFoundError: If there is none.
            ShardError: If it is no index, or one of another version.
        """
        table = IndexTable(file)
        if not table.exists:
            raise FileNotFoundError(f"There is no shard index at {table.folder}.")
        return cls(tuple(table.shards()))

    def save(self, file: Path) -> None:
        """Keeps the index; what is there of these shards already is not written again."""
        writer = TableWriter(IndexTable(file))
        for shard in self.shards:
            writer.add(shard)
        writer.finish()

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def samples(self) -> Samples:
        """All samples."""
        return Samples.concatenate([shard.samples for shard in self.shards])

    @cached_property
    def refused(self) -> tuple[tuple[str, Refusal], ...]:
        """What cannot be used, with the name of its shard."""
        return tuple((name, each) for name, shard in self._named for each in shard.refused)

    @cached_property
    def unread(self) -> tuple[tuple[str, Refusal], ...]:
        """What could not be read so far, with the name of its shard."""
        return tuple((name, each) for name, shard in self._named for each in shard.unread)

    @cached_property
    def without_caption(self) -> tuple[int, ...]:
        """How many samples of each shard have neither a caption nor ``text_embeds``."""
        return tuple(shard.facts.without_caption for shard in self.shards)

    @property
    def first_without_caption(self) -> int:
        """The first such sample; there must be one."""
        number = next(number for number, count in enumerate(self.without_caption) if count)
        return self.first_sample(number) + self.shards[number].facts.first_without_caption

    @cached_property
    def shard_numbers(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(N,) int32, the number of each sample's shard."""
        return np.repeat(np.arange(len(self.shards), dtype=np.int32), np.diff(self._starts))

    @property
    def shard_ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(shards,) int64, how many samples there are up to the end of each shard."""
        return self._starts[1:]

    def first_sample(self, shard: int) -> int:
        """The first sample of a shard."""
        return int(self._starts[shard])

    def shard_number(self, sample: int) -> int:
        """The number of a sample's shard; looks at no other sample."""
        return int(np.searchsorted(self._starts, sample, side="right")) - 1

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(shards + 1,) the first sample of each, and how many there are."""
        return np.cumsum([0, *(len(shard.samples) for shard in self.shards)])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return short_names([shard.url for shard in self.shards])

    @property
    def _named(self) -> Iterator[tuple[str, ShardEntry]]:
        return zip(self._names, self.shards, strict=True)

    def shard_of(self, sample: int) -> ShardEntry:
        """The shard that holds sample number ``sample``."""
        return self.shards[self.shard_number(sample)]

    def sample_id(self, sample: int) -> str:
        """Identity of a sample: its shard's path below the folder that all shards share, and its key."""
        return f"{self._names[self.shard_number(sample)]}/{self.samples.key(sample)}"

    def shard_name(self, shard: int) -> str:
        """The shard's path below the folder that all shards share."""
        return self._names[shard]

    def check(self) -> None:
        """Looks whether this can be trained on.

        Raises:
            ShardError: If something could not be read so far, nothing in the shards can be used, or the latents differ
                in their channels.
        """
        if self.unread:
            shard, (member, reason) = self.unread[0]
            raise ShardError(
                f"The index is not complete: {len(self.unread)} samples or shards could not be read just now (the "
                f"first: {f'{shard}: {member!r}' if member else shard}: {reason}). Start again, or run `videoscale "
                "index` until it has seen all of them; what was read is kept."
            )
        urls = f"{[shard.url for shard in self.shards[:_SHOWN]]}{', …' * (len(self.shards) > _SHOWN)}"
        if not len(self) and not self.refused:
            raise ShardError(f"No samples found: the shards {urls} hold no members.")
        if not len(self):
            shard, (member, reason) = self.refused[0]
            raise ShardError(
                f"No samples found: nothing in the shards {urls} can be used ({len(self.refused)} refused). The first: "
                f"{f'{shard}: the member {member!r}' if member else shard}: {reason}."
            )
        channels: dict[int, int] = {}
        for number, entry in enumerate(self.shards):
            for each, first in entry.facts.latent_channels:
                channels.setdefault(each, self.first_sample(number) + first)
        if len(channels) > 1:
            found = (f"{each} in {self.sample_id(first)}" for each, first in sorted(channels.items()))
            raise ShardError(
                f"The latents have different numbers of channels: {', '.join(found)}. One model takes one number."
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a plan reads: shards by name, keys, shapes, byte ranges.

        Folders and modification times are not part of it, so copies of the same shards agree.
        """
        digest = hashlib.sha256()
        for name, shard in self._named:
            update_contents(digest, name, shard.samples)
        return digest.hexdigest()

    @property
    def captions(self) -> str | None:
        """SHA-256 of all captions, which `digest` knows the lengths of; None where an older release indexed some."""
        each = [shard.captions for shard in self.shards]
        return None if None in each else hashlib.sha256(json.dumps(each).encode()).hexdigest()


def default_index_file(shards: Sequence[str]) -> Path:
    """Where the index of these shards is kept by default, under a name made from all of them.

    Beside the first shard; in the user's cache folder if that is remote.
    """
    if is_remote(shards[0]):
        folder, names = CACHE.expanduser(), identities(shards)
    else:
        folder = Path(shards[0]).resolve().parent
        names = [s if is_remote(s) else os.path.relpath(s, folder) for s in identities(shards)]
    return folder / f"{_NAMED}{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}{SUFFIX}"


def tables_beside(shards: Iterable[str]) -> list[IndexTable]:
    """Tables that lie by default where one that begins with any of these shards, by their identities, would."""
    folders = {CACHE.expanduser() if is_remote(name) else Path(name).parent for name in shards}
    return [IndexTable(table) for folder in sorted(folders) for table in sorted(folder.glob(f"{_NAMED}*{SUFFIX}"))]
