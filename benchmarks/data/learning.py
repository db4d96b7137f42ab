"""Whether a model learns the same by planned batches, fused kernels and split sequences, and sooner.

    python benchmarks/data/learning.py --prepare clips    # on a machine with the packages of the extra `demo`
    python benchmarks/data/learning.py --shards clips     # on two GPUs, or on --ranks of them

A Wan of 31 M parameters trains on clips of the demo's footage, latents of its patch codec, up to 8 064 tokens; the last
frames of every video are held out. ``planned`` and ``equal_token`` run with three seeds each, ``planned`` also without
fused kernels, and with every sequence split over two GPUs. M_comp is such that all have batches of the same sizes, and
a split sequence has as many micro-batches a step as else all ranks together. All run by CUDA graphs: without, the host
takes longer than the device for every batch of a model this small, and batches of any kind would cost the same.

A run is validated every few steps: the mean squared error of the predicted clean latents, at fixed times and with fixed
noise, of its weights and of their moving average. The clock stands still meanwhile, and in the first steps. By
``--normalization step`` the weights of a step's samples sum to one, so that samples of small steps count for more: how
much more, is in the file too. Every finished run is in the output file at once; a
call goes on where an earlier one ended, with its costs. ``--runs`` without a number measures only these: copies of that
file let pairs of GPUs make some of the runs each. `learning_curves.judge` says what the curves show.

``--tiny`` tries the script on CPUs, on clips of ``--prepare clips --clips 20 --side 48``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn.attention import sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from rectified_flow import RectifiedFlow

from benchmarks import provenance
from benchmarks.data.balance_training import budget_of
from benchmarks.data.learning_clips import describe, prepare, unpack
from benchmarks.data.learning_curves import judge
from benchmarks.data.validation_curve import DECAY, TIMES, Curve
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import ATTENTION, trainer_with
from lightning_videoscale import VideoDataModule, benchmark_shapes
from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.cost import BucketBudget, StepTimeModel, TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.data.planning.sample_weights import relative_weights, weights_and_samples
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

BENCHMARK = "data/learning"
GEOMETRY = ModelGeometry(spatial_stride=4, patch_size=(1, 1, 1))
WAN = {
    "num_attention_heads": 8,
    "attention_head_dim": 64,
    "num_layers": 6,
    "ffn_dim": 2560,
    "in_channels": 216,  # 192 of the codec, 24 that tell the place
    "out_channels": 192,
    "text_dim": 64,
    "freq_dim": 256,
    "patch_size": (1, 1, 1),
}
TINY_WAN = WAN | {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "ffn_dim": 64}
FLOW = {"predicts": "clean", "add_places": True, "shift": 3.0, "learning_rate": 5e-4, "warmup_steps": 100}
ROOM = 4.0  # samples of the longest shape in a micro-batch, by memory and by compute
GRAPHS_MEMORY = 0.5  # share of a GPU that graphs may take, so that no batch is too large for one
SPLIT = 2  # ranks that share a sequence, where any do
BALANCES = ("planned", "equal_token")
SEEDS = (0, 1, 2)
Row = dict[str, Any]


class Run(NamedTuple):
    """What tells a run from others."""

    balance: Any
    seed: int
    fused: bool = True
    sp: int = 1


RUNS = [
    *(Run(balance, seed) for seed in SEEDS for balance in BALANCES),
    Run("planned", 0, fused=False),
    Run("planned", 0, sp=SPLIT),
]


def flow_of(task: Row) -> RectifiedFlow:
    return RectifiedFlow("WanTransformer3DModel", task["config"], **FLOW)


def trainer_of(run: Run, task: Row, **settings: Any) -> pl.Trainer:
    """The Trainer of a run, or of the measurement of its costs."""
    callbacks = [*settings.pop("callbacks", []), *([FusedKernels()] if run.fused else [])]
    strategy = SequenceParallelDDPStrategy(
        ulysses_size=run.sp,
        attention_backend="sdpa",
        graphs=not task["tiny"],
        graphs_max_memory=GRAPHS_MEMORY,
    )
    return trainer_with(int(os.environ["WORLD_SIZE"]), task["tiny"], strategy=strategy, callbacks=callbacks, **settings)


def train(run: Run, data: VideoDataModule, clips: list[Any], task: Row) -> Row:
    """A run and its row; collective."""
    pl.seed_everything(run.seed, verbose=False)
    curve = Curve(clips, task["every"], task["warm_up"], run.sp)
    trainer = trainer_of(
        run,
        task,
        callbacks=[curve],
        max_steps=task["steps"],
        max_epochs=-1,
        accumulate_grad_batches=run.sp * task["micro_batches"],
        gradient_clip_val=1.0,
    )
    trainer.fit(flow_of(task), data)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run._asdict() | {"commit": task["commit"]} | curve.row()


def cost_of(shards: str, longest: int, task: Row) -> Row:
    """What `planned` plans by: measured with fused kernels, or FLOPs of a tiny model, whose times tell nothing."""
    module = flow_of(task)
    if task["tiny"]:
        module.configure_model()
        return StepTimeModel.analytic(TransformerFlops.of_module(module), 1e9).to_dict()
    data = VideoDataModule(shards, budget=BucketBudget(1, 1), geometry=GEOMETRY)
    trainer = trainer_of(RUNS[0], task, max_steps=1)
    most = round(ROOM * longest)
    matrix = benchmark_shapes(trainer, module, data, max_shapes=8, max_tokens=most, seconds=0.2, progress=False)
    return StepTimeModel.fit(matrix.measurements).to_dict()


def weights_of(planner: BucketPlanner) -> Row:
    """What a sample counts for, of the shortest and of the longest shape, over the mean of all; in the first epoch.

    And how even the steps are: the mean of their samples, squared, over the mean of the squares.
    """
    plan, lengths = planner.plan(0), planner.table.sequence_lengths
    weights = relative_weights(*weights_and_samples(plan))
    shapes = {"shortest": lengths.argmin(), "longest": lengths.argmax()}
    samples = np.where(plan.filler, 0, np.diff(plan.starts))[plan.grid].sum(axis=(1, 2))
    evenness = {"evenness_of_steps": round(float(samples.mean() ** 2 / np.square(samples).mean()), 3)}
    return {name: round(float(weights[shape]), 3) for name, shape in shapes.items()} | evenness


def measure(shards: list[str], runs: list[list[Any]], cost: Row | None, **task: Any) -> None:
    """All runs in one process group; rank 0 writes what there is, the costs at first."""
    output, is_first = Path(task["output"]), os.environ["RANK"] == "0"
    rows = json.loads(output.read_text())["rows"] if is_first and output.exists() else []

    def write() -> None:
        if is_first:
            settings = task["settings"] | {"cost": cost, "weights": weights}
            provenance.write(output, BENCHMARK, task["commit"], settings, rows)

    held_out = VideoDataModule(shards[0], val_shards=shards[1], budget=BucketBudget(1, 1), geometry=GEOMETRY)
    held_out.setup("fit")
    table, clips = held_out.training_shapes()[0], list(held_out.val_dataloader())
    with sdpa_kernel(ATTENTION["flash"]):  # type: ignore[arg-type]
        cost = cost or cost_of(shards[0], int(table.sequence_lengths.max()), task)
        step_time = StepTimeModel.from_dict(cost)
        budget = budget_of(table, ROOM, ROOM, step_time)
        settled = {"step_time": step_time, "loss_normalization": task["normalization"]}
        k, ranks = task["micro_batches"], task["settings"]["ranks"]
        weights = {b: weights_of(BucketPlanner(table, budget, b, ranks, k, **settled)) for b in BALANCES}
        write()
        for run in (Run(*fields) for fields in runs):
            if is_first:
                say(str(run))
            data = VideoDataModule(
                shards[0],
                balance=run.balance,
                budget=budget,
                micro_batches=run.sp * k,
                geometry=GEOMETRY,
                seed=run.seed,
                **settled,
                num_workers=0 if task["tiny"] else 4,
            )
            rows.append(train(run, data, clips, task))
            write()
    finish(len(rows))


def show(output: Path, commit: str) -> None:
    """Prints what the curves say, and adds it to the settings."""
    found = json.loads(output.read_text())
    judged = {curve: judge(found["rows"], curve) for curve in ("losses", "averaged_losses")}
    provenance.write(output, BENCHMARK, commit, found["settings"] | {"judged": judged}, found["rows"])
    for name, value in judged.items():
        print(f"{name}: {value}")
    print(f"{len(found['rows'])} of {len(RUNS)} runs are in {output}")


def main() -> None:
    parser = provenance.parser(__doc__, output="file to write, or to go on with")
    parser.add_argument("--prepare", type=Path, help="write the clips into this folder, and end")
    parser.add_argument("--clips", type=int, default=180, help="to train on, that are prepared")
    parser.add_argument("--side", type=int, default=112, help="typical side of them in pixels")
    parser.add_argument("--shards", type=Path, help="folder that --prepare has written")
    parser.add_argument("--copies", type=int, default=40, help="how often a clip is in an epoch")
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of a run, even")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a rank and step")
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--normalization", choices=["epoch", "step"], default="epoch", help="of the samples' weights")
    parser.add_argument("--runs", type=int, nargs="*", help="numbers of the runs to make, from 0; left out, all")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.prepare, options.clips, options.side)
        parser.exit(message=f"{options.prepare}: {describe(options.prepare)}\n")
    if options.shards is None:
        parser.error("--prepare a folder of clips first, then name it by --shards.")
    if options.tiny:
        options.steps, options.every, options.copies = 6, 2, 2
    commit = options.commit or provenance.commit()
    output = (options.output or provenance.path("data", "learning")).absolute()
    settings = {
        "dry_run": options.tiny,
        "ranks": options.ranks,
        "model": json.loads(json.dumps(TINY_WAN if options.tiny else WAN)),  # as a file has it
        "flow": FLOW,
        "precision": "bf16-mixed",
        "attention": "flash",
        "graphs_max_memory": GRAPHS_MEMORY,
        "clips": describe(options.shards),
        "copies": options.copies,
        "steps": options.steps,
        "micro_batches": options.micro_batches,
        "warm_up_steps": 1 if options.tiny else 20,
        "validation_times": list(TIMES),
        "m_mem_and_m_comp_over_longest": ROOM,
        "loss_normalization": options.normalization,
        "decay_of_average": DECAY,
    }
    done = json.loads(output.read_text()) if output.exists() else {"rows": [], "settings": {}}
    if done["settings"] and (other := provenance.differences(done, BENCHMARK, settings)):
        parser.error(f"{output} holds runs of other {', '.join(other)}: name another --output.")
    found = {Run(*(row[name] for name in Run._fields)) for row in done["rows"]}
    wanted = RUNS if options.runs is None else [RUNS[number] for number in options.runs]
    runs = [run for run in wanted if run not in found]
    if runs or "cost" not in done["settings"]:
        with tempfile.TemporaryDirectory() as folder:
            shards = unpack(options.shards, Path(folder), options.copies)
            VideoDataModule(shards[0], val_shards=shards[1], geometry=GEOMETRY).prepare_data()
            launch(
                __file__,
                options.ranks,
                shards=shards,
                runs=runs,
                cost=done["settings"].get("cost"),
                config=settings["model"],
                steps=options.steps,
                every=options.every,
                warm_up=settings["warm_up_steps"],
                normalization=options.normalization,
                micro_batches=options.micro_batches,
                tiny=options.tiny,
                settings=settings,
                output=str(output),
                commit=commit,
            )
    show(output, commit)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
