"""What a user gains who adds our strategy, planner, kernels, attention and graphs to what there is without them.

    python benchmarks/suite.py --shapes clips.csv --ranks 2    # columns source, width, height, fps, num_frames

Blocks of Wan-1.3B with random weights train on draws of the standard mix, shards of zeros, in bf16-mixed with
activation checkpointing, one micro-batch a step. The first variant is what a user has today: Lightning's ``ddp``,
diffusers' blocks with their own checkpointing, batches of equally many tokens, torch's attention. Each of the others
adds parts. All train a whole epoch, which has the same clips in other batches. They take turns: in every round each
runs once, and is compared with the first of that round. M_mem is twice the longest sample and M_comp once, for all.

What a training pays once is paid beforehand: the planner's costs are measured with fused kernels, and in a rehearsal
every variant runs the same epoch. There kernels are compiled, attention is measured and cuDNN builds its plans. The
file has its figures as those of round -1, and they count for nothing. Nor does what the first batch waits for: loaders
start.

A call with some of the variants runs the first one beside them, and goes on with the costs and the rows of the file
that an earlier call has left; ``call`` says which rows are of one. ``--tiny`` tries the script on CPUs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import provenance
from benchmarks.data.balance_figures import columns_of, figures_of
from benchmarks.data.balance_mix import mix
from benchmarks.data.balance_training import Record, budget_of, matrix_of, table_of
from benchmarks.data.sparse_shards import write_sparse_shards
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, trainer_with
from lightning_videoscale import VideoDataModule
from lightning_videoscale.cost import StepTimeModel, TransformerFlops
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

TODAY = "today"
VARIANTS: dict[str, tuple[str, ...]] = {
    TODAY: (),
    "planned": ("planned",),
    "fused": ("fused",),
    "planned, fused": ("planned", "fused"),
    "planned, fused, attention": ("planned", "fused", "attention"),
    "all": ("planned", "fused", "attention", "graphs"),
}
REHEARSAL = -1
KEPT = ("tokens_per_second", "samples_per_second", "step_seconds_median", "cv_step_mean", "cv_step_median", "steps")
Row = dict[str, Any]


def module_of(parts: tuple[str, ...], config: dict[str, int]) -> RectifiedFlow:
    """The network of a variant."""
    torch.manual_seed(0)
    module = RectifiedFlow(config)
    if "fused" in parts:
        inject_fused_kernels(module)
    if not parts:
        module.transformer.enable_gradient_checkpointing()
    return module


def strategy_of(parts: tuple[str, ...]) -> DDPStrategy:
    """Lightning's own where nothing of ours takes part."""
    if not parts:
        return DDPStrategy(gradient_as_bucket_view=True)
    return SequenceParallelDDPStrategy(
        ulysses_size=1,
        activation_checkpointing=True,
        attention_backend="auto" if "attention" in parts else "sdpa",
        graphs="auto" if "graphs" in parts else False,
    )


def train(name: str, shards: str, cost: dict[str, Any], task: dict[str, Any]) -> Row:
    """A run of one variant, and its figures."""
    parts = VARIANTS[name]
    step_time, table = StepTimeModel.from_dict(cost), table_of(shards)
    data = VideoDataModule(
        shards,
        balance="planned" if "planned" in parts else "equal_token",
        budget=budget_of(table, 2.0, 1.0, step_time),
        micro_batches=1,
        step_time=step_time,
        num_workers=2,
    )
    record = Record()
    trainer = trainer_with(
        int(os.environ["WORLD_SIZE"]),
        task["tiny"],
        strategy=strategy_of(parts),
        max_epochs=1,
        callbacks=[record],
    )
    trainer.fit(module_of(parts, task["config"]), data)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _without_start(record.rows))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    figures = figures_of(columns_of(everyone, 1, warm_up=0))
    return {"variant": name, **{key: figures[key] for key in KEPT}}


def _without_start(rows: list[list[float]]) -> list[list[float]]:
    """What micro-batches took, without what the first one waited for the loader."""
    (work, wait, _, *load), *others = rows
    return [[work, wait, work + wait, *load], *others]


def measure(shards: str, cost: dict[str, Any] | None, rows: list[Row], **task: Any) -> None:
    """All variants in turns, in one process group; after each run, rank 0 writes what there is."""
    cost = cost or cost_of(shards, task)
    runs: list[Row] = []
    call = {"call": 1 + max((row["call"] for row in rows), default=0)}
    for number in range(REHEARSAL, task["rounds"]):
        for name in task["variants"]:
            runs.append({"round": number, **train(name, shards, cost, task)})
            if os.environ["RANK"] == "0":
                say(str(runs[-1]))
                settings, mine = task["settings"] | {"cost": cost}, [call | row for row in rows_of(runs)]
                provenance.write(Path(task["output"]), "suite", task["commit"], settings, rows + mine)
    finish(len(runs))


def cost_of(shards: str, task: dict[str, Any]) -> dict[str, Any]:
    """The costs that `planned` plans by: measured, or by FLOPs for a tiny model, whose times tell nothing."""
    module = module_of(("fused",), task["config"])
    if task["tiny"]:
        return StepTimeModel.analytic(TransformerFlops.from_config(module.transformer.config), 1e9).to_dict()
    return StepTimeModel.fit(matrix_of(module, shards, task["seconds"], task["tiny"]).measurements).to_dict()


def rows_of(runs: list[Row]) -> list[Row]:
    """The rehearsal's, then medians of each variant, and of its ratios to the first of the same round."""
    first = {run["round"]: run["tokens_per_second"] for run in runs if run["variant"] == TODAY}
    rows = [run for run in runs if run["round"] == REHEARSAL]
    counted = [run for run in runs if run["round"] != REHEARSAL]
    for name in dict.fromkeys(run["variant"] for run in counted):
        mine = [run for run in counted if run["variant"] == name]
        over = [run["tokens_per_second"] / first[run["round"]] for run in mine if run["round"] in first]
        rows.append(
            {
                "variant": name,
                "tokens_per_second": statistics.median(run["tokens_per_second"] for run in mine),
                "samples_per_second": statistics.median(run["samples_per_second"] for run in mine),
                "over_today": round(statistics.median(over), 4) if over else None,
                "over_today_of_rounds": [round(ratio, 4) for ratio in over],
                "cv_step_mean": statistics.median(run["cv_step_mean"] for run in mine),
                "cv_step_median": statistics.median(run["cv_step_median"] for run in mine),
                "rounds": len(mine),
                "steps": mine[0]["steps"],
            }
        )
    return rows


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10, help="of Wan-1.3B's 30")
    parser.add_argument("--longest", type=int, default=32_760, help="tokens; longer samples are left out")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="per shape of the cost model's measurement")
    parser.add_argument("--samples", type=int, default=1000, help="draws of the mix, before long ones are left out")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = (options.output or provenance.path("suite", "today")).absolute()
    config = TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    settings = {name: getattr(options, name) for name in ("ranks", "longest", "rounds", "samples")}
    settings |= {"dry_run": options.tiny, "table": provenance.table(options.shapes)}
    settings |= {"model": config}
    done = json.loads(output.read_text()) if output.exists() else {"rows": [], "settings": {}}
    if done["settings"] and (other := provenance.differences(done, "suite", settings)):
        parser.error(f"{output} holds variants of other {', '.join(other)}: name another --output.")
    with tempfile.TemporaryDirectory() as folder:
        draws = [
            shape for shape in mix(options.shapes, options.samples, options.tiny) if _tokens(shape) <= options.longest
        ]
        shards = write_sparse_shards(Path(folder), draws, shards=32)
        VideoDataModule(shards).prepare_data()
        say(f"{len(draws)} samples are indexed")
        launch(
            __file__,
            options.ranks,
            shards=shards,
            cost=done["settings"].get("cost"),
            rows=done["rows"],
            config=config,
            variants=list(dict.fromkeys([TODAY, *options.variants])),
            rounds=options.rounds,
            seconds=options.seconds,
            tiny=options.tiny,
            settings=settings,
            output=str(output),
            commit=commit,
        )
    print(f"written to {output}")


def _tokens(latents: ClipShape) -> int:
    return latents.frames * (latents.height // 2) * (latents.width // 2)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
