"""A training on the standard mix with CUDA graphs beside one without: losses, throughput and memory.

    python benchmarks/parallel/graphs_on_mix.py --shapes clips.csv    # columns source, width, height, fps, num_frames

Blocks of Wan-1.3B with random weights and fused kernels train under ``planned`` on draws of the mix, in bf16-mixed, one
micro-batch a step: on images and the shortest clips, as a training begins, and on images to the longest clips. Costs
are FLOPs, so that all runs on a mix have the same plan. The first pair runs under deterministic algorithms,
where losses are to be equal to the bit. The others take turns with torch's usual algorithms, where a run without graphs
differs from its own repetition, too: "again" shows by how much. ``--tiny`` tries the script on CPUs, where no graph is
captured.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_figures import columns_of, row_of
from benchmarks.data.balance_mix import latents_of_draw, table_of_draw
from benchmarks.data.balance_training import Record, budget_of, table_of
from benchmarks.data.sparse_shards import write_sparse_shards
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, trainer_with
from lightning_videoscale import VideoDataModule
from lightning_videoscale.cost import StepTimeModel, TransformerFlops
from lightning_videoscale.data.planning.shapes import Clips
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

BENCHMARK = "parallel/graphs_on_mix"
WARM_UP = 4  # steps that do not count for throughput
KEPT = ("tokens_per_second", "step_seconds_median", "cv_step_mean", "steps")
Row = dict[str, Any]


class Losses(pl.Callback):
    """Of this rank's steps, and how many passes ran by graphs."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.calls: dict[str, int] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, SequenceParallelDDPStrategy)
        self.calls = trainer.strategy.describe_graphs()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.all.append(float(outputs["loss"]))


def module_of(task: dict[str, Any]) -> RectifiedFlow:
    pl.seed_everything(0, verbose=False)
    module = RectifiedFlow(task["config"])
    inject_fused_kernels(module)
    return module


def train(shards: str, cost: Row, task: dict[str, Any], graphs: bool, deterministic: bool) -> Row:
    """The row of a run, with the losses of all ranks."""
    torch.use_deterministic_algorithms(deterministic)
    step_time = StepTimeModel.from_dict(cost)
    data = VideoDataModule(
        shards,
        balance="planned",
        budget=budget_of(table_of(shards), task["m_mem"], 1.0, step_time),
        micro_batches=1,
        step_time=step_time,
        num_workers=2,
    )
    record, losses = Record(), Losses()
    strategy = SequenceParallelDDPStrategy(
        ulysses_size=task["ulysses"], attention_backend="sdpa", graphs="auto" if graphs else False
    )
    world = int(os.environ["WORLD_SIZE"])
    module = module_of(task)
    steps = task["steps"] + WARM_UP
    trainer = trainer_with(world, task["tiny"], strategy=strategy, max_steps=steps, callbacks=[record, losses])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, data)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (record.rows, losses.all, _reserved_bytes(), losses.calls))
    del trainer, module, strategy
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    figures = row_of("planned", 1, columns_of([rows for rows, *_ in everyone], 1, WARM_UP))
    return {
        "graphs": graphs,
        "deterministic": deterministic,
        **{name: figures[name] for name in KEPT},
        "losses": [of_rank for _, of_rank, *_ in everyone],
        "reserved_bytes": max(reserved for *_, reserved, _ in everyone),
        "calls": [calls for *_, calls in everyone],
    }


def _reserved_bytes() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def beside(row: Row, eager: Row) -> Row:
    """A run with graphs, beside the one without them before it."""
    pairs = [(a, b) for x, y in zip(row["losses"], eager["losses"], strict=True) for a, b in zip(x, y, strict=True)]
    return row | {
        "largest_difference_of_losses": max(abs(a - b) / abs(b) for a, b in pairs),
        "throughput_over_eager": row["tokens_per_second"] / eager["tokens_per_second"],
        "reserved_more_bytes": row["reserved_bytes"] - eager["reserved_bytes"],
    }


def measure(shards: dict[str, str], **task: Any) -> None:
    """Pairs of runs on each mix in one process group; after each, rank 0 writes what there is."""
    rows: list[Row] = []
    cost = StepTimeModel.analytic(TransformerFlops.from_config(task["config"])).to_dict()
    for (longest, folder), rounds in zip(shards.items(), task["rounds"], strict=True):
        for number in range(1 + rounds):
            pair = partial(train, folder, cost, task, deterministic=number == 0)
            eager = pair(graphs=False)
            made = [eager, beside(pair(graphs=True), eager)]
            if number == rounds > 0:
                made.append(beside(pair(graphs=False), eager) | {"again": True})
            rows += [{"longest": int(longest)} | row for row in made]
            if os.environ["RANK"] == "0":
                for row in made:
                    say(str({name: value for name, value in row.items() if name != "losses"}))
                provenance.write(Path(task["output"]), BENCHMARK, task["commit"], task["settings"], rows)
    finish(len(rows))


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share a clip")
    parser.add_argument("--layers", type=int, default=4, help="of Wan-1.3B's 30")
    parser.add_argument("--steps", type=int, default=100, help="that count, of each run")
    parser.add_argument("--rounds", type=int, nargs=2, default=[1, 1], help="pairs with torch's usual algorithms")
    parser.add_argument("--samples", type=int, default=3000, help="draws of the mix")
    parser.add_argument("--longest", type=int, nargs=2, default=[1_560, 75_600], help="tokens of a sample, of each mix")
    parser.add_argument("--m-mem", type=float, default=1.0, help="tokens of a micro-batch, over the longest sample's")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = (options.output or provenance.path("parallel", "graphs_on_mix")).absolute()
    names = ("ranks", "ulysses", "steps", "rounds", "samples", "longest", "m_mem")
    config = TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    settings = {name: getattr(options, name) for name in names} | {"dry_run": options.tiny, "model": config}
    settings |= {"warm_up": WARM_UP, "table": provenance.table(options.shapes)}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products; processes inherit it
    with tempfile.TemporaryDirectory() as folder:
        clips, shards = Clips.from_csv(options.shapes), {}
        for longest in options.longest:
            table = table_of_draw(clips, options.samples, longest=longest, tiny=options.tiny)
            (place := Path(folder, str(longest))).mkdir()
            shards[str(longest)] = write_sparse_shards(place, latents_of_draw(table), shards=32)
            VideoDataModule(shards[str(longest)]).prepare_data()
        launch(
            __file__,
            options.ranks,
            shards=shards,
            config=config,
            settings=settings,
            output=str(output),
            commit=commit,
            **{name: getattr(options, name) for name in ("ulysses", "steps", "rounds", "tiny", "m_mem")},
        )
    print(f"written to {output}")


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
