"""What the three balances make of real training steps on several GPUs.

    python benchmarks/data/balances.py --shapes clips.csv    # columns source, width, height, fps, num_frames

Wan-1.3B's blocks with random weights, trained under `ulysses_ddp` with ulysses_size = 1 and activation checkpointing on
the standard mix: every step runs through VideoDataModule, planner, strategy and Trainer, on shards of zeros. A step of
the whole model on this mix takes seconds; one of its 30 blocks takes a thirtieth, and neither the distribution of
sequence lengths nor the cost of a token or a pair of tokens beside each other changes. What is balanced is a model of
the step time that is measured first, on the same GPUs.

A run is an epoch: all balances train on the same clips, every clip once. The draws are as many as make 100 steps of the
balance that has the fewest; with K = 4 that are fewer steps, as long together. On H200s a call of K = 1 takes seven
minutes and one of K = 4 six, on two as on four.

M_mem is four times the longest sample. M_comp is the one under which `planned` has the most tokens per predicted
second, as `budget="auto"` would choose it for the first K; both are the same for all balances and every K of a file.
SDPA is held to FlashAttention, as cuDNN builds a plan for every shape that a rank has not seen: in a short run, for
most of them. Every finished run is in the output file at once, its report in --reports; a call goes on where an earlier
one ended, with the costs and the M_comp of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_figures import Columns, columns_of, row_of
from benchmarks.data.sparse_shards import write_sparse_shards
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, latents_of, trainer_with
from lightning_videoscale import VideoDataModule, benchmark_shapes
from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.cost import BucketBudget, ShapeMatrix, StepTimeModel, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import BucketPlanner, SampleTable
from lightning_videoscale.data.planning.compute_budget import best_of, try_budgets
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ClipShape, standard_mix
from lightning_videoscale.timing import StepTimes, StepWindow, subscribe_to_steps

RANKS = 4
BALANCES = ("planned", "equal_token", "dual_constraint")
SAMPLES_PER_RANK = 1550
WARM_UP = 2
SAY_EVERY = 20
TINY_POLICY = replace(STANDARD_POLICY, areas=(64 * 64, 96 * 96, 128 * 128), max_frames=17, crop_min_frames=5)


def mix(file: Path, samples: int, tiny: bool) -> list[ClipShape]:
    """Latents of the draws of the standard mix, in their order."""
    policy = TINY_POLICY if tiny else STANDARD_POLICY
    table = SampleTable.of_clips(standard_mix(Clips.from_csv(file), samples), policy, GEOMETRIES["wan2.1"])
    shapes = [latents_of(shape) for shape in table.shapes]
    return [shapes[number] for number in table.shape_id if number >= 0]


class Record(pl.Callback):
    """What each micro-batch of this rank was, and where its time went."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            rank, total = trainer.global_rank, sum(window.column(name) for name in StepTimes._fields)
            load = [window.column(name) for name in ("samples", "sequence_length", "predicted_cost", "loss_weight")]
            columns = [window.column("compute"), window.column("wait"), total, *load[:3], (load[3] != 0).double()]
            self.rows = torch.stack([column[rank] for column in columns], dim=1).tolist()

        subscribe_to_steps(trainer, sys.maxsize, receive)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and (batch_idx + 1) % SAY_EVERY == 0:
            say(f"  {batch_idx + 1} of {trainer.num_training_batches} micro-batches")


def train(
    module: RectifiedFlow,
    shards: str,
    balance: Any,
    k: int,
    budget: BucketBudget,
    step_time: StepTimeModel,
    **task: Any,
) -> Columns:
    """Trains an epoch; every field of the micro-batches, (steps, ranks, micro-batches), warm-up left out."""
    data = VideoDataModule(
        shards,
        balance=balance,
        budget=budget,
        micro_batches=k,
        step_time=step_time,
        num_workers=2,
    )
    record = Record()
    report = [] if task["reports"] is None else [RunReport(Path(task["reports"]) / f"{balance}-k{k}", every_n_steps=10)]
    trainer = trainer_with(
        int(os.environ["WORLD_SIZE"]),
        task["tiny"],
        max_epochs=1,
        max_steps=task["max_steps"].get(str(k), -1),
        accumulate_grad_batches=k,
        callbacks=[*report, record],
    )
    trainer.fit(module, data)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, record.rows)
    return columns_of(everyone, k, WARM_UP)


def budget_of(table: SampleTable, m_mem: float, m_comp: float, step_time: StepTimeModel) -> BucketBudget:
    """Both in multiples of the longest sample."""
    longest, p = int(table.sequence_lengths.max()), step_time.power_law.p
    return BucketBudget(m_mem * longest, m_comp * float(longest) ** p, p)


def best_m_comp(table: SampleTable, m_mem: float, k: int, step_time: StepTimeModel) -> float:
    """The one that `planned` does best with, in multiples of the longest sample."""
    budget, ranks = budget_of(table, m_mem, 1.0, step_time), int(os.environ["WORLD_SIZE"])
    tried = try_budgets(BucketPlanner(table, budget, dp_size=ranks, micro_batches=k, step_time=step_time))
    best = best_of(tried)
    if os.environ["RANK"] == "0":
        before, after = tried[0].figures.efficiency, best.figures.efficiency
        say(f"M_comp = {best.factor:g} x the longest sample: mean / max {after:.1%}, and {before:.1%} with 1 x")
    return best.factor


def measure(shards: str, runs: list[tuple[str, int]], cost: dict[str, Any] | None, **task: Any) -> None:
    """All runs in one process group; after each, rank 0 writes what there is."""
    tiny, output = task["tiny"], Path(task["output"])
    config = TINY_WAN if tiny else WAN_1_3B | {"num_layers": task["layers"]}
    module = RectifiedFlow(config, attention="flash")
    is_first = os.environ["RANK"] == "0"
    rows = json.loads(output.read_text())["rows"] if is_first and output.exists() else []
    if cost is None:
        matrix = matrix_of(module, shards, task["seconds"], tiny)
        # Times of a tiny model on busy CPUs need not even grow with its work.
        flops = TransformerFlops.from_config(module.transformer.config)
        model = StepTimeModel.analytic(flops, 1e9) if tiny else StepTimeModel.fit(matrix.measurements)
        cost = model.to_dict()
        if is_first:
            if task["reports"] is not None:
                matrix.save(Path(task["reports"]) / "matrix.json")
            say(f"cost: {cost}")
    step_time, table = StepTimeModel.from_dict(cost), table_of(shards)
    m_comp = best_m_comp(table, task["m_mem"], runs[0][1], step_time) if task["m_comp"] is None else task["m_comp"]
    settings = task["settings"] | {"m_comp_over_longest": m_comp, "cost": cost}
    if is_first:
        write(output, task["commit"], settings, rows)
    budget = budget_of(table, task["m_mem"], m_comp, step_time)
    for balance, k in runs:
        if is_first:
            say(f"{balance}, K = {k}")
        columns = train(module, shards, balance, k, budget, step_time, **task)
        if is_first:
            rows.append(row_of(balance, k, columns))
            write(output, task["commit"], settings, rows)
            show(rows[-1])
    finish(len(rows))


def table_of(shards: str) -> SampleTable:
    """The samples as they are trained."""
    data = VideoDataModule(shards)
    data.setup("fit")
    return data.training_shapes()[0]


def matrix_of(module: RectifiedFlow, shards: str, seconds: float, tiny: bool) -> ShapeMatrix:
    """Step times, measured under the strategy of the runs; collective."""
    trainer = trainer_with(int(os.environ["WORLD_SIZE"]), tiny, max_steps=1)
    data = VideoDataModule(shards, budget=BucketBudget(1, 1))
    return benchmark_shapes(trainer, module, data, max_shapes=8, seconds=seconds)


def write(output: Path, commit: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The rows so far, each beside equal_token's where there is one."""
    base = {row["micro_batches"]: row["tokens_per_second"] for row in rows if row["balance"] == "equal_token"}
    for row in rows:
        if row["micro_batches"] in base:
            row["over_equal_token"] = row["tokens_per_second"] / base[row["micro_batches"]]
    provenance.write(output, "data/balances", commit, settings, rows)


def show(row: dict[str, Any]) -> None:
    say(
        f"{row['balance']:16} K={row['micro_batches']}: {row['tokens_per_second']:9.0f} tokens/s, "
        f"{row.get('over_equal_token', float('nan')):.3f} x equal_token, {row['share_of_ceiling']:.1%} of the ceiling, "
        f"CV_step {row['cv_step_median']:.1%} (p95 {row['cv_step_p95']:.1%}), cost CV {row['cost_cv']:.1%}, "
        f"B·S² CV {row['b_s2_cv']:.1%}, cost error {row['cost_error_median']:.1%}, "
        f"{row['steps']} steps of {row['step_seconds_median']:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--layers", type=int, default=1, help="of Wan-1.3B's 30")
    parser.add_argument("--m-mem", type=float, default=4.0, help="in multiples of the longest sample")
    parser.add_argument("--m-comp", type=float, help="likewise, to the power p; left out, the best for `planned`")
    parser.add_argument("--samples", type=int, help=f"draws of the mix; left out, {SAMPLES_PER_RANK} for each rank")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="values of K")
    parser.add_argument("--max-steps", type=int, nargs="+", default=[], help="of a run with each K; left out, an epoch")
    parser.add_argument("--reports", type=Path, help="folder for the report of each run, and for the measured costs")
    parser.add_argument("--seconds", type=float, default=0.3, help="per shape of the cost model's measurement")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    parser.add_argument("--output", type=Path, help="file to write, or to go on with")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = (options.output or provenance.path("data", "balances")).absolute()
    samples = options.samples or SAMPLES_PER_RANK * options.ranks
    done = json.loads(output.read_text()) if output.exists() else {"rows": [], "settings": {}}
    if len(options.max_steps) not in (0, len(options.micro_batches)):
        parser.error(f"--max-steps {options.max_steps} are not one for each K of {options.micro_batches}.")
    max_steps = {str(k): steps for k, steps in zip(options.micro_batches, options.max_steps, strict=False)}
    m_comp = done["settings"].get("m_comp_over_longest") if options.m_comp is None else options.m_comp
    settings = {
        "dry_run": options.tiny,
        "ranks": options.ranks,
        "model": TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers},
        "attention": "flash",
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "mix": {"samples": samples, "seed": 0, "table": provenance.table(options.shapes)},
        "max_steps": max_steps,
        "m_mem_over_longest": options.m_mem,
        "m_comp_over_longest": m_comp,
        "warm_up_steps": WARM_UP,
    }
    if done["settings"] and (other := provenance.differences(done, "data/balances", settings)):
        parser.error(f"{output} holds runs of other {', '.join(other)}: name another --output.")
    found = {(row["balance"], row["micro_batches"]) for row in done["rows"]}
    runs = [(balance, k) for k in options.micro_batches for balance in BALANCES if (balance, k) not in found]
    if not runs:
        parser.exit(message=f"{output} has all runs already.\n")
    with tempfile.TemporaryDirectory() as folder:
        shards = write_sparse_shards(Path(folder), mix(options.shapes, samples, options.tiny), shards=32)
        data = VideoDataModule(shards)
        data.prepare_data()
        say(f"{samples} samples are indexed")
        launch(
            __file__,
            options.ranks,
            shards=shards,
            runs=runs,
            cost=done["settings"].get("cost"),
            settings=settings,
            m_mem=options.m_mem,
            m_comp=m_comp,
            max_steps=max_steps,
            reports=None if options.reports is None else str(options.reports.absolute()),
            layers=options.layers,
            seconds=options.seconds,
            tiny=options.tiny,
            output=str(output),
            commit=commit,
        )
    print(f"written to {output}")


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
