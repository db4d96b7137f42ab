"""Building the index: many samples looked at side by side, what is known kept, what is damaged listed."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.shards.errors import ShardError, UnreachableError
from lightning_videoscale.data.shards.index import ShardEntry, ShardIndex, header_line, shard_line
from lightning_videoscale.data.shards.inspection import Described, RefusedError, describe
from lightning_videoscale.data.shards.location import Members, ShardStat, identity, is_remote
from lightning_videoscale.data.shards.samples import Sample, Samples
from lightning_videoscale.data.shards.storage import Shard, open_shard, open_whole
from lightning_videoscale.data.shards.tars import Refusal, list_members

_SECONDS_WITHOUT_BAR = 2.0
_SHARDS_AT_ONCE = 4
_UNFINISHED = ".unfinished"
_T = TypeVar("_T")


def build_index(
    shards: Sequence[str], file: Path, workers: int = 1, progress: bool = False, caption_key: str | None = None
) -> ShardIndex:
    """Indexes shards and keeps the table; of what is kept already, only shards that changed are looked at again.

    A build that is stopped leaves what it had beside the file, and the next one goes on from there. So it does where
    the network failed: what could not be read is in `ShardIndex.unread`, and only that is looked at the next time.

    Args:
        shards: Paths and URLs, in the order that samples are numbered.
        file: Where the table is kept.
        workers: Threads that look at samples. Decoding and waiting for servers both leave the others free to run.
        progress: Whether to show a progress bar if it takes long.
        caption_key: Field of ``.json`` that holds the captions; see `find_caption`.

    Raises:
        ShardError: As `index_shards` does, and if ``file`` is something else than an index.
        OSError: If the table cannot be written.
    """
    with _journal(file) as (known, note):
        index = index_shards(shards, known, workers=workers, progress=progress, note=note, caption_key=caption_key)
        index.save(file)
    return index


def index_shards(
    shards: Sequence[str],
    known: Sequence[ShardEntry] = (),
    *,
    workers: int = 1,
    progress: bool = False,
    note: Callable[[ShardEntry], None] | None = None,
    caption_key: str | None = None,
) -> ShardIndex:
    """Indexes shards without keeping the table.

    Args:
        shards: Paths and URLs, in the order that samples are numbered.
        known: Shards that were indexed before; they are looked at again only if they have changed.
        workers: Threads that look at samples.
        progress: Whether to show a progress bar if it takes long.
        note: Is told of every shard that was looked at, as soon as it is done.
        caption_key: Field of ``.json`` that holds the captions; see `find_caption`.

    Raises:
        ShardError: If a shard is missing, or its server is unfit. Damaged shards and members are no error: see
            `ShardIndex.refused`. Nor is what cannot be reached: see `ShardIndex.unread`.
    """
    before = {identity(entry.url): entry for entry in known}
    bar = tqdm(desc="indexing", unit=" samples", delay=_SECONDS_WITHOUT_BAR, disable=not progress, leave=False)
    samples_pool = ThreadPoolExecutor(workers, "sample")
    shards_pool = ThreadPoolExecutor(min(workers, _SHARDS_AT_ONCE), "shard")
    look = _Look(samples_pool, bar, caption_key)
    try:
        # Before hours are spent on the first shards, the last ones are asked for.
        stats = dict(zip(shards, shards_pool.map(look.stat, shards), strict=True))
        futures = [shards_pool.submit(look.at_shard, url, stats[url], before.get(identity(url))) for url in shards]
        entries = []
        for url, future in zip(shards, futures, strict=True):
            entry = future.result()
            if note is not None and entry is not before.get(identity(url)):
                note(entry)
            entries.append(entry)
            bar.set_postfix(shards=f"{len(entries)}/{len(shards)}", refresh=False)
    finally:
        samples_pool.shutdown(wait=False, cancel_futures=True)  # first: shards under way wait for their samples
        shards_pool.shutdown(cancel_futures=True)
        samples_pool.shutdown()
        bar.close()
    return ShardIndex(tuple(entries))


def known_shards(file: Path) -> list[ShardEntry]:
    """Returns what an index file holds, and what builds that were stopped have left beside it.

    Raises:
        ShardError: If the file is something else than an index.
    """
    entries = list(ShardIndex.load(file).shards) if file.exists() else []
    for left in _left_behind(file):
        # Another node may be at it just now: its first line may not be written yet, or the file gone again.
        with suppress(ShardError, FileNotFoundError):
            entries += ShardIndex.load(left).shards
    return entries


def outdated(shards: Sequence[str], known: Sequence[ShardEntry]) -> list[str]:
    """Which shards `index_shards` would look at, since they are not known or have changed.

    Raises:
        ShardError: If a shard cannot be read.
    """
    before = {identity(entry.url): (entry.size, entry.stamp) for entry in known}
    return [url for url in shards if before.get(identity(url)) != open_shard(url).stat()]


class _Look:
    """A look at shards, by several threads.

    Once the network has failed a read for good, others are tried without pauses until one succeeds: a server that is
    gone would otherwise be waited for at every sample.
    """

    def __init__(self, pool: ThreadPoolExecutor, bar: tqdm, caption_key: str | None) -> None:
        self._pool = pool
        self._bar = bar
        self._caption_key = caption_key
        self._is_gone = threading.Event()

    def stat(self, url: str) -> ShardStat | UnreachableError | None:
        """The version of a remote shard. None: ask when it is opened, since files are compared with what is open."""
        return self._tried(lambda shard: shard.stat(), *_both(url)) if is_remote(url) else None

    def at_shard(self, url: str, stat: ShardStat | UnreachableError | None, before: ShardEntry | None) -> ShardEntry:
        """Looks at a shard, or at what is not known of it."""
        both = _both(url)
        stat = both[0].stat() if stat is None else stat
        if isinstance(stat, UnreachableError):
            return self._unread(url, before, stat)
        is_same = before is not None and (before.size, before.stamp) == stat
        if before is not None and is_same and not before.unread and before.caption_key == self._caption_key:
            return before
        size = stat.size
        listing = self._tried(lambda shard: list_members(open_whole(shard, size), size), *both)
        if isinstance(listing, UnreachableError):
            return self._unread(url, before if is_same else None, listing)
        rows = {sample.key: sample for sample in before.samples} if before is not None and is_same else {}
        keys = list(listing.samples)
        look = partial(self._at_sample, both)
        looked = list(self._pool.map(look, keys, listing.samples.values(), map(rows.get, keys)))
        found = [described for described in looked if isinstance(described, Described)]
        samples = Samples.of([described.sample for described in found])
        extensions = {extension for key in samples.keys for extension in listing.samples[key]}
        return ShardEntry(
            url=url,
            size=stat.size,
            stamp=stat.stamp,
            samples=samples,
            refused=(*listing.refused, *(each for each in looked if isinstance(each, Refusal))),
            ignored=tuple(sorted(extensions.difference(samples.extensions))),
            unread=tuple(
                Refusal(key, str(each))
                for key, each in zip(keys, looked, strict=True)
                if isinstance(each, UnreachableError)
            ),
            caption_key=self._caption_key,
            caption_fields=tuple(sorted({each.caption_field for each in found if each.caption_field})),
        )

    def _at_sample(
        self, both: tuple[Shard, Shard], key: str, members: Members, known: Sample | None
    ) -> Described | Refusal | UnreachableError:
        try:
            return self._tried(lambda shard: describe(shard, key, members, self._caption_key, known), *both)
        except RefusedError as error:
            return error.refusal
        finally:
            with self._bar.get_lock():
                self._bar.update()

    def _tried(self, look: Callable[[Shard], _T], patient: Shard, hasty: Shard) -> _T | UnreachableError:
        try:
            found = look(hasty if self._is_gone.is_set() else patient)
        except UnreachableError as error:
            self._is_gone.set()
            return error
        self._is_gone.clear()
        return found

    def _unread(self, url: str, before: ShardEntry | None, error: UnreachableError) -> ShardEntry:
        if before is None:
            before = ShardEntry(url, 0, "", Samples.of([]), caption_key=self._caption_key)
        return replace(before, unread=(Refusal("", str(error)),))


def _both(url: str) -> tuple[Shard, Shard]:
    """A shard to read from with patience, and without."""
    patient = open_shard(url)
    return patient, open_shard(url, ()) if is_remote(url) else patient


@contextmanager
def _journal(file: Path) -> Iterator[tuple[list[ShardEntry], Callable[[ShardEntry], None]]]:
    """What is known of earlier builds, and a way to note what this one finds; both are dropped when it succeeds."""
    left = _left_behind(file)
    known = known_shards(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    mine = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}{_UNFINISHED}")
    with mine.open("a", encoding="utf-8") as lines:
        lines.write(header_line())

        def note(entry: ShardEntry) -> None:
            lines.write(shard_line(entry, file.parent))
            lines.flush()

        yield known, note
    for journal in {mine, *left}:
        journal.unlink(missing_ok=True)


def _left_behind(file: Path) -> list[Path]:
    return sorted(file.parent.glob(glob.escape(file.name) + ".*" + _UNFINISHED))
