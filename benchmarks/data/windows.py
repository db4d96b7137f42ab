"""What planning an epoch in windows costs a rank, for very many clips: seconds per window, and memory of its own.

    python benchmarks/data/windows.py
    python benchmarks/data/windows.py --rows 1e8 --folder /tmp/clips  # 3.3 GB; the folder stays for the next run

The table is synthetic: a million videos of common sizes and any length, again and again, 1000 a shard, in the shapes of
`STANDARD_POLICY` for Wan-14B on 1 024 ranks. Only the columns that planning reads are there, in files that are mapped
into memory. A *rank* is a process that has imported the package, looks which clips can be trained on, and plans the
first windows of an epoch as a training does.

Seconds are those of the processor, which other work on the machine hardly changes. Memory is what the kernel counts for
the process alone, ``RssAnon`` and ``RssShmem``, at its peak, less what there was before. Mapped files are page cache.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.data.index_scale import MIB, memory, own

ROWS_PER_SHARD, AT_ONCE = 1000, 1_000_000
SIZES = ((320, 240), (960, 540), (1280, 720), (404, 720), (1920, 1080), (640, 480), (480, 272), (352, 640), (800, 450))
SHARES = (0.333, 0.333, 0.18, 0.07, 0.06, 0.01, 0.006, 0.005, 0.003)
LONGEST = 75_600
COLUMNS = {
    "width": np.int32, "height": np.int32, "num_frames": np.int32, "fps": np.float64, "duration": np.float64,
    "media": np.uint8, "caption_length": np.int32,
}  # fmt: skip


def make(folder: Path, rows: int) -> None:
    """Writes the columns: some clips, again and again."""
    folder.mkdir(parents=True)
    draws, count = np.random.default_rng(0), min(rows, AT_ONCE)
    size = np.array(SIZES)[draws.choice(len(SIZES), count, p=SHARES)]
    fps, frames = draws.choice([24.0, 25.0, 29.97], count), draws.integers(20, 310, count)
    drawn = {
        "width": size[:, 0], "height": size[:, 1], "num_frames": frames, "fps": fps, "duration": frames / fps,
        "media": np.ones(count), "caption_length": draws.integers(1, 400, count),
    }  # fmt: skip
    for name, dtype in COLUMNS.items():
        with (folder / name).open("wb") as file:
            for begin in range(0, rows, count):
                drawn[name][: rows - begin].astype(dtype).tofile(file)


def samples(folder: Path, rows: int) -> Any:
    """The table; what planning does not read is not there."""
    from lightning_videoscale.data.shards.columns import Columns
    from lightning_videoscale.data.shards.samples import Samples

    mapped = {name: np.memmap(folder / name, dtype, "r", shape=(rows,)) for name, dtype in COLUMNS.items()}
    others = {name: np.empty(0) for name in Columns.__dataclass_fields__ if name not in (*COLUMNS, "file")}
    return Samples.part(Columns(**mapped, **others), 0, rows, ())


class Peak:
    """The most memory of its own that the process has while a context is open, in bytes."""

    def __enter__(self) -> Peak:
        self.bytes, self._ends = own(memory()), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.02):
            self.bytes = max(self.bytes, own(memory()))


def timed(task: Callable[[], Any]) -> tuple[Any, float]:
    """What a task returns, and its seconds of the processor."""
    begin = time.process_time()
    return task(), time.process_time() - begin


def rank(folder: Path, rows: int, window: int, ranks: int, windows: int) -> dict[str, Any]:
    """Plans the first windows of an epoch."""
    import torch

    from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, StepTimeModel
    from lightning_videoscale.cost.geometry import GEOMETRIES
    from lightning_videoscale.data.loading.progress import Progress
    from lightning_videoscale.data.planning import BucketPlanner
    from lightning_videoscale.data.planning.figures import PlanFigures
    from lightning_videoscale.data.planning.shapes import STANDARD_POLICY
    from lightning_videoscale.data.planning.windows import EpochWindows

    ends = np.r_[np.arange(ROWS_PER_SHARD, rows, ROWS_PER_SHARD), rows]
    step_time = StepTimeModel.analytic(TRANSFORMERS["wan2.1-14b"], longest=LONGEST)
    p = step_time.power_law.p
    budget = BucketBudget(2 * LONGEST, LONGEST**p, p)
    before = own(memory())
    with Peak() as peak:
        cut = EpochWindows(window, samples(folder, rows), ends, np.zeros(len(ends), np.int32), STANDARD_POLICY,
                           GEOMETRIES["wan2.1"])  # fmt: skip
        usable, looking = timed(lambda: int(cut.usable.sum()))
        planner = BucketPlanner(cut.sample, budget, dp_size=ranks, step_time=step_time, windows=cut)
        place, first = timed(lambda: Progress.start(planner, 0))
        seconds, left, carried = [first], [], []
        for _ in range(windows - 1):
            left.append(len(place.plan.left_over))
            place, each = timed(lambda: place.next_window(planner))  # noqa: B023 - called at once
            assert place.plan.window is not None
            carried.append(len(place.plan.window.carried))
            seconds.append(each)
        kept = io.BytesIO()
        torch.save(place.state_dict(place.counted + 1), kept)
    assert left == carried
    figures = PlanFigures.of(place.plan)
    assert place.plan.window is not None
    return {
        "rows": rows, "usable": usable, "shards": len(ends), "window": place.plan.window.last - place.plan.window.first,
        "dp_size": ranks, "windows_planned": windows, "steps": place.plan.steps, "carried": carried,
        "cpu_seconds_looking_at_all": round(looking, 2), "cpu_seconds_per_window": [round(each, 2) for each in seconds],
        "peak_own_mib": round((peak.bytes - before) / MIB, 1), "state_kib": round(len(kept.getvalue()) / 1024, 1),
        "efficiency": round(figures.efficiency, 4), "diversity": round(figures.diversity, 4),
    }  # fmt: skip


def main() -> None:
    def number(text: str) -> int:
        return int(float(text))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=number, nargs="+", default=[10**7, 10**8])
    parser.add_argument("--window", type=number, nargs="+", default=[1_000_000])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4, help="how many are planned")
    parser.add_argument(
        "--folder", type=Path, help="where to make the table, and to leave it (default: a temporary one)"
    )
    parser.add_argument("--task", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        folder, rows, window, ranks = options.task
        print(json.dumps(rank(Path(folder), int(rows), int(window), int(ranks), options.windows)))
        return
    from benchmarks import provenance

    commit = provenance.commit()
    folder, results = options.folder or Path(tempfile.mkdtemp()), []
    try:
        for rows in options.rows:
            if not (here := folder / f"clips-{rows}").exists():
                make(here, rows)
            for window in options.window:
                task = [str(here), str(rows), str(window), str(options.ranks)]
                command = [sys.executable, __file__, "--windows", str(options.windows), "--task", *task]
                results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
                print(json.dumps(results[-1]), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    settings = {
        "rows_per_shard": ROWS_PER_SHARD, "model": "wan2.1-14b", "m_mem": 2 * LONGEST,
        "m_comp": "one sample of 75 600 tokens",
    }  # fmt: skip
    provenance.write(provenance.path("data", "windows"), "data/windows", commit, settings, results)


if __name__ == "__main__":
    main()
