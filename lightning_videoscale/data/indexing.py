"""Building the index: many samples looked at side by side, what is known kept, what is damaged listed."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.data.describing import RefusedError, describe
from lightning_videoscale.data.index import ShardEntry, ShardIndex, header_line, shard_line
from lightning_videoscale.data.samples import Sample, Samples
from lightning_videoscale.data.shards import Members, ShardError, identity
from lightning_videoscale.data.storage import Shard, open_shard, open_whole
from lightning_videoscale.data.tars import Refusal, list_members

_SECONDS_WITHOUT_BAR = 2.0
_SHARDS_AT_ONCE = 4
_UNFINISHED = ".unfinished"


def build_index(shards: Sequence[str], file: Path, workers: int = 1, progress: bool = False) -> ShardIndex:
    """Indexes shards and keeps the table; of what is kept already, only shards that changed are looked at again.

    A build that is stopped leaves what it had beside the file, and the next one goes on from there.

    Args:
        shards: Paths and URLs, in the order that samples are numbered.
        file: Where the table is kept.
        workers: Threads that look at samples. Decoding and waiting for servers both leave the others free to run.
        progress: Whether to show a progress bar if it takes long.

    Raises:
        ShardError: As `index_shards` does, and if ``file`` is something else than an index.
        OSError: If the table cannot be written.
    """
    with _journal(file) as (known, note):
        index = index_shards(shards, known, workers=workers, progress=progress, note=note)
        index.save(file)
    return index


def index_shards(
    shards: Sequence[str],
    known: Sequence[ShardEntry] = (),
    *,
    workers: int = 1,
    progress: bool = False,
    note: Callable[[ShardEntry], None] | None = None,
) -> ShardIndex:
    """Indexes shards without keeping the table.

    Args:
        shards: Paths and URLs, in the order that samples are numbered.
        known: Shards that were indexed before; they are looked at again only if they have changed.
        workers: Threads that look at samples.
        progress: Whether to show a progress bar if it takes long.
        note: Is told of every shard that was looked at, as soon as it is done.

    Raises:
        ShardError: If a shard cannot be read. Damaged shards and members are no error: see `ShardIndex.refused`.
    """
    before = {identity(entry.url): entry for entry in known}
    bar = tqdm(desc="indexing", unit=" samples", delay=_SECONDS_WITHOUT_BAR, disable=not progress, leave=False)
    samples_pool = ThreadPoolExecutor(workers, "sample")
    shards_pool = ThreadPoolExecutor(min(workers, _SHARDS_AT_ONCE), "shard")
    try:
        look = partial(_look_at_shard, pool=samples_pool, bar=bar)
        futures = [shards_pool.submit(look, url, before.get(identity(url))) for url in shards]
        entries = []
        for url, future in zip(shards, futures, strict=True):
            entry = future.result()
            if note is not None and entry is not before.get(identity(url)):
                note(entry)
            entries.append(entry)
            bar.set_postfix(shards=f"{len(entries)}/{len(shards)}", refresh=False)
    finally:
        shards_pool.shutdown(cancel_futures=True)
        samples_pool.shutdown(cancel_futures=True)
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


def _look_at_shard(url: str, before: ShardEntry | None, pool: ThreadPoolExecutor, bar: tqdm) -> ShardEntry:
    shard = open_shard(url)
    stat = shard.stat()
    if before is not None and (before.size, before.stamp) == stat:
        return before
    listing = list_members(open_whole(shard, stat.size), stat.size)
    looked = list(pool.map(partial(_look_at_sample, shard, bar=bar), listing.samples, listing.samples.values()))
    samples = Samples.of([sample for sample in looked if isinstance(sample, Sample)])
    refused = [refusal for refusal in looked if isinstance(refusal, Refusal)]
    found = {extension for key in samples.keys for extension in listing.samples[key]}
    ignored = tuple(sorted(found.difference(samples.extensions)))
    return ShardEntry(url, stat.size, stat.stamp, samples, (*listing.refused, *refused), ignored)


def _look_at_sample(shard: Shard, key: str, members: Members, bar: tqdm) -> Sample | Refusal:
    try:
        return describe(shard, key, members)
    except RefusedError as error:
        return error.refusal
    finally:
        with bar.get_lock():
            bar.update()


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
