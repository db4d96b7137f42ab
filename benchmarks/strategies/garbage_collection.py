"""What full passes of Python's garbage collector cost: left alone, and together on all ranks as the strategies do it.

    python benchmarks/strategies/garbage_collection.py    # on two GPUs, or on CPUs

A Wan with random weights trains on one short clip a rank, so that steps wait for the host. Both variants take turns.
``full_passes`` are those of rank 0 in the steps that count. They lie between steps 64 and 128, after which the
strategies collect. ``compute_cv`` is std / mean of the ranks' compute times in a step.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_training import Record
from benchmarks.launch import finish, launch, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, trainer_with
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.garbage import ShortCollections
from lightning_videoscale.injection import inject_fused_kernels

BENCHMARK = "strategies/garbage_collection"
VARIANTS = ("left alone", "together")
CLIP = ClipShape(4, 16, 16, latents=True)  # 256 tokens


class Passes(pl.Callback):
    """The seconds of full passes in steps that count."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.seconds, self._begin = warm_up, [], 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            gc.callbacks.append(self._note)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                self._begin = time.perf_counter()
            else:
                self.seconds.append(time.perf_counter() - self._begin)


def train(variant: str, config: dict[str, int], warm_up: int, steps: int, tiny: bool) -> dict[str, Any]:
    """A run, as rank 0 sees it; collective."""
    world, record, passes = int(os.environ["WORLD_SIZE"]), Record(), Passes(warm_up)
    torch.manual_seed(0)
    module = RectifiedFlow(config)
    inject_fused_kernels(module)
    batch = RandomBatches()(Cell(CLIP, CLIP.frames * CLIP.height * CLIP.width // 4, 1))
    trainer = trainer_with(world, tiny, max_steps=warm_up + steps, callbacks=[record, passes])
    trainer.fit(module, DataLoader([batch] * (warm_up + steps), batch_size=None))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, record.rows)
    work, _, total = np.array(everyone, np.float64)[:, warm_up:, :3].transpose(2, 1, 0)
    cv = work.std(axis=1) / work.mean(axis=1)
    return {
        "variant": variant,
        "full_passes": len(passes.seconds),
        "longest_pass_seconds": max(passes.seconds, default=0.0),
        "step_seconds_mean": float(total.max(axis=1).mean()),
        "step_seconds_median": float(np.median(total.max(axis=1))),
        "compute_cv_mean": float(cv.mean()),
        "compute_cv_median": float(np.median(cv)),
        "compute_cv_p95": float(np.quantile(cv, 0.95)),
    }


def measure(rounds: int, **task: Any) -> None:
    """Both variants in turns, in one process group."""
    runs = []
    for number in range(rounds):
        for variant in VARIANTS[:: -1 if number % 2 else 1]:
            if variant == "together":
                runs.append(train(variant, **task))
            else:
                with patch.object(ShortCollections, "renew", lambda _: None):
                    runs.append(train(variant, **task))
    finish(runs)


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median run of each variant, figure by figure."""
    rows = []
    for variant in VARIANTS:
        mine = [run for run in runs if run["variant"] == variant]
        figures = {key: statistics.median(run[key] for run in mine) for key in mine[0] if key != "variant"}
        rows.append({"variant": variant, **{key: round(value, 5) for key, value in figures.items()}})
    return rows


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="that count, of each run")
    parser.add_argument("--warm-up", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tiny = not torch.cuda.is_available()
    task = {"config": TINY_WAN | {"num_layers": 30} if tiny else WAN_1_3B | {"num_layers": 10}, "tiny": tiny}
    task |= {name: getattr(options, name) for name in ("warm_up", "steps", "rounds")}
    commit = options.commit or provenance.commit()
    rows = rows_of(launch(__file__, options.ranks, **task))
    for row in rows:
        print(row)
    output = options.output or provenance.path("strategies", "garbage_collection")
    provenance.write(output, BENCHMARK, commit, task | {"ranks": options.ranks, "clip": list(CLIP)}, rows)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
