"""What opening an index of very many clips costs a rank and its workers: seconds, and memory of their own.

    python benchmarks/data/index_scale.py
    python benchmarks/data/index_scale.py --rows 1e8 --folder /tmp/index  # 13 GB; the folder stays for the next run

The index is synthetic: latents with a caption and fields, 1000 a shard. The shards are files of the right size without
content, so that `VideoDataModule` finds them unchanged. A *rank* is a process that has imported the package and then
does what `setup` does: lists the shards, asks for their versions, opens the index, checks it, and makes the reader. A
*worker* is one of its DataLoader's processes, and looks at rows all over the index.

Seconds are those of the clock, and of the processor, which other work on the machine hardly changes. Memory is what the
kernel counts for a process alone, in MiB: for the rank ``RssAnon`` and ``RssShmem`` after less before, for a worker
``Private_Dirty`` after reading rows less before. Pages of mapped files (``RssFile``) are left out: they are the page
cache, which a machine holds once and gives back when it needs memory. They are listed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

ROWS_PER_SHARD = 1000
LOOKED_AT = 20_000
MEMBERS = {"latents.npy": 1_050_000, "json": 512, "txt": 512}
MIB = 2**20


def make(folder: Path, rows: int, lines: bool) -> None:
    """Writes the index and its empty shards."""
    from lightning_videoscale.data.shards.columns import Columns
    from lightning_videoscale.data.shards.index import default_index_file
    from lightning_videoscale.data.shards.index_table import IndexTable, TableWriter
    from lightning_videoscale.data.shards.samples import Samples
    from lightning_videoscale.data.shards.shard_entry import ShardEntry, header_line, shard_line
    from lightning_videoscale.data.shards.storage import open_shard

    (folder / "shards").mkdir(parents=True)
    shards = [folder / "shards" / f"{number:06}.tar" for number in range(-(-rows // ROWS_PER_SHARD))]
    table = IndexTable(default_index_file([str(shard) for shard in shards]))
    writer = TableWriter(table)
    draws = np.random.default_rng(0)
    sizes = np.tile([*MEMBERS.values()], ROWS_PER_SHARD)
    ends = np.cumsum(sizes + 512)
    older = table.folder.with_suffix(".jsonl").open("w") if lines else None
    if older is not None:
        older.write(header_line())
    for number, shard in enumerate(shards):
        with shard.open("wb") as file:
            file.truncate(int(ends[-1]))
        count = min(ROWS_PER_SHARD, rows - number * ROWS_PER_SHARD)
        side = draws.integers(15, 60, (2, count)) * 2
        columns = Columns.create(
            [f"clip{number * ROWS_PER_SHARD + row:09}" for row in range(count)],
            {
                "channels": np.full(count, 16), "width": side[0], "height": side[1],
                "num_frames": draws.integers(1, 22, count), "fps": np.zeros(count), "duration": np.zeros(count),
                "media": np.full(count, 2), "caption_length": draws.integers(1, 400, count),
            },
            np.full(count, len(MEMBERS)),
            {
                "extension": np.tile(np.arange(len(MEMBERS)), count),
                "offset": (ends - sizes)[: count * len(MEMBERS)], "size": sizes[: count * len(MEMBERS)],
            },
            np.zeros(count),
            {"seek_stamp": (), "seek_begin": ()},
        )  # fmt: skip
        version = open_shard(str(shard)).stat()
        entry = ShardEntry(str(shard), *version, Samples.part(columns, 0, count, tuple(MEMBERS)))
        if older is None:
            writer.add(entry)
        else:
            older.write(shard_line(entry, table.folder.parent))
    if older is None:
        writer.finish()


def rank(folder: Path) -> dict[str, Any]:
    """Opens the index as `VideoDataModule.setup` does, and has a worker look at rows."""
    from torch.utils.data import DataLoader

    from lightning_videoscale.data.loading.indexed_shards import IndexedShards
    from lightning_videoscale.data.shards.indexing import known_shards, versions_of

    shards = IndexedShards(str(folder / "shards" / "*.tar"), {}, None)
    before = memory()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    shards.read(16.0, None)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    after = memory()
    index = shards.index("shards")
    looks = DataLoader(_Looks(index), batch_size=None, num_workers=1)
    [worker] = list(looks)
    urls = [shard.url for shard in index.shards]
    parts = {}
    for name, part in (("table", lambda: known_shards(shards.file)), ("versions", lambda: versions_of(urls))):
        begin = time.process_time()
        part()
        parts[f"cpu_seconds_of_{name}"] = round(time.process_time() - begin, 3)
    return {
        "rows": len(index), "shards": len(index.shards), "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3), **parts,
        "rank_own_mib": round((own(after) - own(before)) / MIB, 1),
        "rank_own_mib_with_package": round(own(after) / MIB, 1),
        "rank_file_mib": round(after["RssFile"] / MIB, 1), **worker,
    }  # fmt: skip


class _Looks:
    """One item: what a worker's own memory grows by when it looks at rows."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> dict[str, Any]:
        rows = np.random.default_rng(1).integers(0, len(self._index), LOOKED_AT).tolist()
        look(self._index, rows[:100])  # what any worker costs
        before = private_dirty()
        begin = time.process_time()
        look(self._index, rows)
        micros = 1e6 * (time.process_time() - begin) / LOOKED_AT
        return {"worker_own_mib": round((private_dirty() - before) / MIB, 1), "worker_cpu_us_per_row": round(micros, 1)}


def look(index: Any, rows: list[int]) -> None:
    for row in rows:
        sample = index.samples[row]
        assert index.sample_id(row).endswith(sample.key) and len(sample.members) == len(MEMBERS)


def memory() -> dict[str, int]:
    """Bytes of this process that the kernel counts as anonymous, shared and of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words and words[0].startswith("Rss")}


def own(counted: dict[str, int]) -> int:
    return counted["RssAnon"] + counted["RssShmem"]


def private_dirty() -> int:
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return next(int(words[1]) * 1024 for words in lines if words[0] == "Private_Dirty:")


def forget(folder: Path) -> None:
    """Takes the index out of the page cache."""
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix != ".tar":
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folder: Path, rows: int, rounds: int, lines: bool) -> dict[str, Any]:
    """The medians of several ranks, one after the other; the first finds nothing in the page cache."""
    here = folder / f"{'lines' if lines else 'table'}-{rows}"
    begin = time.perf_counter()
    if not here.exists():
        serve("make", here, rows, lines)
    made = round(time.perf_counter() - begin, 1)
    forget(here)
    answers = [serve("rank", here) for _ in range(1 + rounds)]
    size = sum(file.stat().st_size for file in here.rglob("*") if file.is_file() and file.suffix != ".tar")
    first, warm = answers[0], answers[1:]
    row = {name: statistics.median(answer[name] for answer in warm) for name in first}
    form = "lines of JSON" if lines else "Arrow"
    return {"form": form, **row, "seconds_cold": first["seconds"], "bytes_per_row": round(size / rows, 1), "made": made}


def serve(*task: Any) -> Any:
    """Runs a task in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--task", *map(str, task)], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout or "null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: int(float(text)), nargs="+", default=[10**6, 10**7])
    parser.add_argument("--lines", type=lambda text: int(float(text)), nargs="*", default=[10**6], help="rows as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make it, and to leave it (default: a temporary one)")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        name, folder, *others = options.task
        done = make(Path(folder), int(others[0]), others[1] == "True") if name == "make" else rank(Path(folder))
        print(json.dumps(done))
        return
    from benchmarks import provenance

    commit = provenance.commit()
    folder = options.folder or Path(tempfile.mkdtemp())
    results = []
    try:
        for rows, lines in [*((rows, True) for rows in options.lines), *((rows, False) for rows in options.rows)]:
            results.append(measure(folder, rows, options.rounds, lines))
            print(json.dumps(results[-1]), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    settings = {"rows_per_shard": ROWS_PER_SHARD, "rounds": options.rounds, "rows_looked_at": LOOKED_AT}
    provenance.write(provenance.path("data", "index_scale"), "data/index_scale", commit, settings, results)


if __name__ == "__main__":
    main()
