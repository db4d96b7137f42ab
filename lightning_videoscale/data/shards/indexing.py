"""Building the index: many samples looked at side by side, what is known kept, what is damaged listed."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.shards.captions import digest_of_captions
from lightning_videoscale.data.shards.errors import ShardError, UnreachableError
from lightning_videoscale.data.shards.index import ShardIndex, tables_beside
from lightning_videoscale.data.shards.index_table import IndexTable, TableWriter
from lightning_videoscale.data.shards.inspection import Described, RefusedError, describe
from lightning_videoscale.data.shards.location import Members, ShardStat, identities, is_remote
from lightning_videoscale.data.shards.samples import Sample, Samples
from lightning_videoscale.data.shards.shard_entry import ShardEntry, header_line, read_lines, shard_line
from lightning_videoscale.data.shards.storage import Shard, open_shard, open_whole
from lightning_videoscale.data.shards.tars import Refusal, list_members

_SECONDS_WITHOUT_BAR = 2.0
_SHARDS_AT_ONCE = 4
_VERSIONS_AT_ONCE = 32
_T = TypeVar("_T")

Version = ShardStat | UnreachableError
"""How a shard is now, or why that cannot be known."""


def build_index(
    shards: Sequence[str], file: Path, workers: int = 1, progress: bool = False, caption_key: str | None = None
) -> ShardIndex:
    """Indexes shards and keeps the table; of what is kept already, only shards that changed are looked at again.

    What is not kept there, and is in another table beside the shards, is taken from that one: a pattern that names a
    shard more than before has a table of another name. A build that is stopped leaves what it had beside the file, and
    the next one goes on from there. So it does where the network failed: what could not be read is in
    `ShardIndex.unread`, and only that is looked at the next time.

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
    table = IndexTable(file)
    older = table.older
    known, left = known_shards(file), table.journals()
    known = [*_known_beside(shards, known), *known]
    looks = _look_at_all(shards, known, workers, progress, caption_key, versions_of(shards))
    with closing(looks), _Journal(table) as journal:
        writer = TableWriter(table)
        for entry in looks:
            if entry.stored is None:
                journal.note(entry)
            if writer.add(entry):
                journal.drop()
        index = ShardIndex(tuple(writer.finish()))
        journal.drop()
    for journal_of_another in left:
        journal_of_another.unlink(missing_ok=True)
    if older is not None:
        warnings.warn(
            f"The shard index {older} is of an older release. It was converted to {table.folder}, without decoding "
            "anything again, and is not read any more: delete it.",
            stacklevel=2,
        )
    return index


def index_shards(
    shards: Sequence[str],
    known: Sequence[ShardEntry] = (),
    *,
    workers: int = 1,
    caption_key: str | None = None,
    versions: Sequence[Version] | None = None,
) -> ShardIndex:
    """Indexes shards without keeping the table.

    Args:
        shards: Paths and URLs, in the order that samples are numbered.
        known: Shards that were indexed before; they are looked at again only if they have changed.
        workers: Threads that look at samples.
        caption_key: Field of ``.json`` that holds the captions; see `find_caption`.
        versions: What `versions_of` says of each; None: it is asked.

    Raises:
        ShardError: If a shard is missing, or its server is unfit. Damaged shards and members are no error: see
            `ShardIndex.refused`. Nor is what cannot be reached: see `ShardIndex.unread`.
    """
    versions = versions_of(shards) if versions is None else versions
    return ShardIndex(tuple(_look_at_all(shards, known, workers, False, caption_key, versions)))


def versions_of(shards: Sequence[str]) -> list[Version]:
    """How each shard is now, or why it cannot be reached: many are asked for at a time.

    Raises:
        ShardError: If a shard is missing, or its server is unfit.
    """
    tried = _Tried()
    pool = ThreadPoolExecutor(_VERSIONS_AT_ONCE, "version")
    try:
        return list(pool.map(lambda url: tried(lambda shard: shard.stat(), *_both(url)), shards))
    finally:
        pool.shutdown(cancel_futures=True)


def _look_at_all(
    shards: Sequence[str],
    known: Sequence[ShardEntry],
    workers: int,
    progress: bool,
    caption_key: str | None,
    versions: Sequence[Version],
) -> Generator[ShardEntry, None, None]:
    """What is in each shard, in order, as soon as it is known."""
    before = _Known(known)
    bar = tqdm(desc="indexing", unit=" samples", delay=_SECONDS_WITHOUT_BAR, disable=not progress, leave=False)
    samples_pool = ThreadPoolExecutor(workers, "sample")
    shards_pool = ThreadPoolExecutor(min(workers, _SHARDS_AT_ONCE), "shard")
    look = _Look(samples_pool, bar, caption_key)
    try:
        looks: deque[ShardEntry | Future[ShardEntry]] = deque()
        for url, name, version in zip(shards, identities(shards), versions, strict=True):
            entry = before.entry(name, version)
            if entry is not None and look.is_known(entry, version):
                looks.append(entry)
            else:
                looks.append(shards_pool.submit(look.at_shard, url, version, entry))
        while looks:
            bar.set_postfix(shards=f"{len(shards) - len(looks)}/{len(shards)}", refresh=False)
            each = looks.popleft()
            yield each if isinstance(each, ShardEntry) else each.result()
    finally:
        samples_pool.shutdown(wait=False, cancel_futures=True)  # first: shards under way wait for their samples
        shards_pool.shutdown(cancel_futures=True)
        samples_pool.shutdown()
        bar.close()


def known_shards(file: Path) -> list[ShardEntry]:
    """Returns what an index file holds, and what builds that were stopped have left beside it.

    Raises:
        ShardError: If the file is something else than an index.
    """
    table = IndexTable(file)
    entries = table.known()
    for left in table.journals():
        # Another node may be at it just now: its first line may not be written yet, or the file gone again.
        with suppress(ShardError, FileNotFoundError):
            entries += read_lines(left)
    return entries


def _known_beside(shards: Sequence[str], known: Sequence[ShardEntry]) -> list[ShardEntry]:
    """What other tables hold of the shards that are not among those that are known."""
    unknown = set(identities(shards)) - set(identities(entry.url for entry in known))
    entries: list[ShardEntry] = []
    for table in tables_beside(unknown):
        with suppress(ShardError, OSError):  # of another release, or not whole
            found = table.known()
            names = identities(entry.url for entry in found)
            entries += [entry for entry, name in zip(found, names, strict=True) if name in unknown]
    return entries


def outdated(shards: Sequence[str], known: Sequence[ShardEntry], caption_key: str | None = None) -> list[str]:
    """Which shards `index_shards` would look at: not known, changed, or known with the captions of another field.

    Raises:
        ShardError: If a shard cannot be read.
    """
    before, now = _Known(known), zip(shards, identities(shards), versions_of(shards), strict=True)
    found = ((url, version, before.entry(name, version)) for url, name, version in now)
    return [
        url
        for url, version, entry in found
        if entry is None or (entry.size, entry.stamp) != version or entry.caption_key != caption_key
    ]


class _Known:
    """Shards as they were, of some maybe several versions."""

    def __init__(self, entries: Sequence[ShardEntry]) -> None:
        self._last: dict[str, ShardEntry] = {}
        self._versions: dict[tuple[str, int, str], ShardEntry] = {}
        for name, entry in zip(identities(entry.url for entry in entries), entries, strict=True):
            self._last[name] = self._versions[name, entry.size, entry.stamp] = entry

    def entry(self, name: str, version: Version) -> ShardEntry | None:
        """What was known last of a shard in this version, or else of it at all."""
        same = None if isinstance(version, UnreachableError) else self._versions.get((name, *version))
        return same or self._last.get(name)


class _Tried:
    """Reads with patience, as long as the network is there.

    Once it has failed a read for good, others are tried without pauses until one succeeds: a server that is gone would
    otherwise be waited for at every sample.
    """

    def __init__(self) -> None:
        self._is_gone = threading.Event()

    def __call__(self, look: Callable[[Shard], _T], patient: Shard, hasty: Shard) -> _T | UnreachableError:
        try:
            found = look(hasty if self._is_gone.is_set() else patient)
        except UnreachableError as error:
            self._is_gone.set()
            return error
        self._is_gone.clear()
        return found


class _Look:
    """A look at shards, by several threads."""

    def __init__(self, pool: ThreadPoolExecutor, bar: tqdm, caption_key: str | None) -> None:
        self._pool = pool
        self._bar = bar
        self._caption_key = caption_key
        self._tried = _Tried()

    def is_known(self, entry: ShardEntry, version: Version) -> bool:
        """Whether nothing has to be looked at."""
        is_same = (entry.size, entry.stamp) == version
        return is_same and not entry.unread and entry.caption_key == self._caption_key

    def at_shard(self, url: str, version: Version, before: ShardEntry | None) -> ShardEntry:
        """Looks at a shard, or at what is not known of it."""
        if isinstance(version, UnreachableError):
            return self._unread(url, before, version)
        both = _both(url)
        stat = version if is_remote(url) else both[0].stat()  # of the file that is open now
        known = before if before is not None and (before.size, before.stamp) == stat else None
        size = stat.size
        listing = self._tried(lambda shard: list_members(open_whole(shard, size), size), *both)
        if isinstance(listing, UnreachableError):
            return self._unread(url, known, listing)
        rows = {} if known is None else {sample.key: sample for sample in known.samples}
        keys = list(listing.samples)
        look = partial(self._at_sample, both)
        looked = list(self._pool.map(look, keys, listing.samples.values(), map(rows.get, keys)))
        found = [described for described in looked if isinstance(described, Described)]
        samples = Samples.of([described.sample for described in found])
        extensions = {extension for key in samples.keys for extension in listing.samples[key]}
        extensions |= {ignored for each in found for ignored in each.ignored}
        if known is not None:  # what its samples ignore is not looked for again
            extensions.update(known.ignored)
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
            caption_fields=tuple(sorted({each.caption.field for each in found if each.caption.field})),
            captions=digest_of_captions([each.caption.text for each in found]),
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

    def _unread(self, url: str, before: ShardEntry | None, error: UnreachableError) -> ShardEntry:
        if before is None:
            before = ShardEntry(url, 0, "", Samples.of([]), caption_key=self._caption_key)
        return replace(before, unread=(Refusal("", str(error)),), stored=None)


def _both(url: str) -> tuple[Shard, Shard]:
    """A shard to read from with patience, and without."""
    patient = open_shard(url)
    return patient, open_shard(url, ()) if is_remote(url) else patient


class _Journal:
    """What a build has found and no part of the table holds yet, as lines in a file; it stays where the build fails."""

    def __init__(self, table: IndexTable) -> None:
        self._folder = table.folder.parent
        self._file = table.new_journal()
        self._lines: TextIO | None = None

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()

    def note(self, entry: ShardEntry) -> None:
        """Adds a shard."""
        if self._lines is None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._lines = self._file.open("a", encoding="utf-8")
            except OSError as error:
                raise OSError(
                    f"No index can be kept in {self._folder}: {error.strerror}. Name another place: --index FILE, in "
                    "Python VideoDataModule(index=...)."
                ) from error
            self._lines.write(header_line())
        self._lines.write(shard_line(entry, self._folder))
        self._lines.flush()

    def drop(self) -> None:
        """Forgets all shards."""
        if self._lines is not None:
            self._lines.close()
            self._file.unlink(missing_ok=True)
        self._lines = None
