"""What new shapes cost the allocator of CUDA's memory: in segments of fixed sizes, and in expandable ones.

    python benchmarks/strategies/allocator.py    # on one GPU

Blocks of Wan-1.3B train with activation checkpointing under a cap of memory, on micro-batches of the standard mix,
each of as many samples as --tokens leave room for, in an order of its own in every round. Each variant is a process
of its own, and they take turns. ``excess_seconds`` is what steps took beyond the fastest of their shape, in each
round. An allocator that has no block of the right size asks the driver for one; if that has none left, it gives all
back first. The strategies expand segments where the environment does not say otherwise.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_mix import mix
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, trainer_with
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.injection import inject_fused_kernels

BENCHMARK = "strategies/allocator"
FIXED = "expandable_segments:False"
VARIANTS = {"fixed": FIXED, "expandable": ""}
STATS = (
    *("num_alloc_retries", "num_device_alloc", "num_device_free"),
    *("reserved_bytes.all.peak", "allocated_bytes.all.peak"),
)
GIB = 2**30


class Seconds(pl.Callback):
    """Of every step, by the device's own waiting."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.taken.append(time.perf_counter() - self._begin)


def train(config: dict[str, int], cells: list[list[Any]], rounds: int, cap_gib: float, tiny: bool) -> None:
    """One variant, in this process."""
    if not tiny:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
    torch.manual_seed(0)
    module = RectifiedFlow(config)
    inject_fused_kernels(module)
    batches = RandomBatches()
    made = [Cell(ClipShape(*shape), length, samples) for shape, length, samples in cells]
    order = [number for turn in range(rounds) for number in random.Random(turn).sample(range(len(made)), len(made))]
    seconds = Seconds()
    loader: Any = DataLoader(order, batch_size=None, collate_fn=lambda number: batches(made[number]))
    trainer_with(1, tiny, max_steps=len(order), callbacks=[seconds]).fit(module, loader)
    stats = {} if tiny else torch.cuda.memory_stats()
    finish({"order": order, "seconds": seconds.taken} | {name: stats.get(name, 0) for name in STATS})


def row_of(variant: str, runs: list[dict[str, Any]], cells: int, rounds: int) -> dict[str, Any]:
    """Medians of the runs of a variant."""
    excess = []
    for run in runs:
        fastest = {n: min(s for k, s in zip(run["order"], run["seconds"], strict=True) if k == n) for n in range(cells)}
        beyond = [s - fastest[n] for n, s in zip(run["order"], run["seconds"], strict=True)]
        excess.append([sum(beyond[turn * cells : (turn + 1) * cells]) for turn in range(rounds)])
    return {
        "variant": variant,
        "seconds": round(statistics.median(sum(run["seconds"]) for run in runs), 3),
        "excess_seconds": [round(statistics.median(column), 3) for column in zip(*excess, strict=True)],
        **{name.split(".")[0]: statistics.median(run[name] for run in runs) for name in STATS},
    }


def cells_of(shapes: Path, samples: int, count: int, tokens: int, tiny: bool) -> list[list[Any]]:
    """So many shapes of the mix, each in micro-batches of at most so many tokens."""
    lengths = {shape: shape.frames * (shape.height // 2) * (shape.width // 2) for shape in mix(shapes, samples, tiny)}
    fitting = sorted((shape for shape in lengths if lengths[shape] <= tokens), key=lambda shape: lengths[shape])
    chosen = random.Random(0).sample(fitting, min(count, len(fitting)))
    return [[list(shape), lengths[shape], tokens // lengths[shape]] for shape in chosen]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--layers", type=int, default=10, help="of Wan-1.3B's 30")
    parser.add_argument("--cap-gib", type=float, default=20.0, help="that a process may take")
    parser.add_argument("--tokens", type=int, default=62_000, help="of a micro-batch, at most")
    parser.add_argument("--cells", type=int, default=20, help="different shapes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each comes")
    parser.add_argument("--runs", type=int, default=2, help="of each variant, in turns")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    config = TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    cells = cells_of(options.shapes, 3000, options.cells, options.tokens, options.tiny)
    task = {"config": config, "cells": cells, "rounds": options.rounds, "cap_gib": options.cap_gib}
    launch(__file__, 1, (), {"PYTORCH_CUDA_ALLOC_CONF": FIXED}, tiny=options.tiny, **task | {"rounds": 1})
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.runs):
        for variant, allocator in VARIANTS.items():
            environment = {"PYTORCH_CUDA_ALLOC_CONF": allocator}
            runs[variant].append(launch(__file__, 1, (), environment, tiny=options.tiny, **task))
            say(str(row_of(variant, runs[variant], len(cells), options.rounds)))
    rows = [row_of(variant, runs[variant], len(cells), options.rounds) for variant in VARIANTS]
    output = options.output or provenance.path("strategies", "allocator")
    settings = task | {"dry_run": options.tiny, "tokens": options.tokens, "runs": options.runs}
    provenance.write(output, BENCHMARK, commit, settings | {"table": provenance.table(options.shapes)}, rows)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        train(**task)
    else:
        main()
