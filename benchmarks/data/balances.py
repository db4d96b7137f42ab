"""What the three balances make of real training steps on several GPUs.

    python benchmarks/data/balances.py --shapes clips.csv --ranks 2    # columns source, width, height, fps, num_frames
    python benchmarks/data/balances.py --shapes clips.csv --ranks 2 --micro-batches 4 --steps 5 \
        --balances planned equal_token
    python benchmarks/data/balances.py --shapes clips.csv --ranks 4 --ulysses 2 --layers 8
    python benchmarks/data/balances.py --shapes clips.csv --ranks 2 --strategy ulysses_fsdp2 --layers 8 \
        --micro-batches 1 4 --steps 15 8

Wan-1.3B with random weights and fused kernels trains with activation checkpointing on the standard mix: every step
runs through VideoDataModule, planner, strategy and Trainer, on shards of zeros. What is balanced is a model of the step
time that is measured first, on the same GPUs; the measured table is in the file too, for
`benchmarks/predictions/replayed_balances.py`, which says what whole epochs and more ranks would make of it.

A run is the first steps of an epoch under one balance. There are two draws of the mix that share no clip, and balances
take turns in them. Every balance has its own best M_comp, as `budget="auto"` would choose it on the first draw, and
with ``--m-comp-of common`` all have the same; `equal_token` has none. Of short runs the tokens per second tell little:
every balance begins with other clips. So ``over_equal_token`` compares the measured share of the ceiling, times the
ceiling of the whole epoch, which has the same clips under every balance. A ceiling is what ranks would reach that never
wait, by the measured costs.

SDPA is held to FlashAttention, as cuDNN builds a plan for every shape that a rank has not seen: in a short run, for
most of them. Before the runs one block trains on all of their micro-batches, so that kernels are loaded. Every finished
run is in the output file at once, its report in --reports, and the costs before them; a call goes on where an earlier
one ended. ``--tiny`` tries the script on CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_figures import row_of
from benchmarks.data.balance_mix import DRAWS, latents_of_draw, table_of_draw
from benchmarks.data.balance_training import (
    STRATEGIES,
    budget_of,
    matrix_of,
    module_of,
    rehearse,
    strategy_of,
    table_of,
    train,
    waits_of,
)
from benchmarks.data.sparse_shards import write_sparse_shards
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, latents_of
from lightning_videoscale import VideoDataModule
from lightning_videoscale.cost import StepTimeModel, TransformerFlops
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.data.planning.compute_budget import best_of, try_budgets
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import Clips, ClipShape

BALANCES = ("equal_token", "dual_constraint", "planned")
M_COMP_OF = ("own", "common")
WARM_UP = 2  # micro-batches at least, in whole steps
Task = dict[str, Any]
Row = dict[str, Any]


class Run(NamedTuple):
    """One run.

    Attributes:
        balance: One of `BALANCES`.
        micro_batches: K, of each rank and step.
        m_comp_of: Which M_comp: the balance's ``own`` best, or the one that is ``common`` to all; None: it has none.
        draw: Of the mix.
        steps: That count.
    """

    balance: Any
    micro_batches: int
    m_comp_of: str | None
    draw: int
    steps: int

    @property
    def warm_up(self) -> int:
        """Steps before those that count."""
        return math.ceil(WARM_UP / self.micro_batches)

    @property
    def name(self) -> str:
        """Of a folder."""
        return f"{self.balance}-k{self.micro_batches}-{self.m_comp_of or 'no'}_m_comp-draw{self.draw}"


def runs_of(
    balances: Sequence[str], steps: dict[int, int], m_comp_of: Sequence[str], draws: Sequence[int]
) -> list[Run]:
    """All runs, balances in turns; steps by K."""
    return [
        Run(balance, k, of, draw, count)
        for k, count in steps.items()
        for draw in draws
        for balance in balances[:: -1 if draw % 2 else 1]
        for of in (m_comp_of if balance != "equal_token" else (None,))
    ]


def best_m_comp(planner: BucketPlanner, in_slots: bool) -> float:
    """The one that a balance does best with, over the planner's own."""
    return best_of(try_budgets(planner), in_slots).factor


def planners_of(
    runs: Sequence[Run], step_time: StepTimeModel, task: Task
) -> Iterator[tuple[Run, float, BucketPlanner]]:
    """Each run's M_comp, in multiples of the longest sample, and its planner; the same on all ranks."""
    dp_size, in_slots = int(os.environ["WORLD_SIZE"]) // task["ulysses"], task["settings"]["ranks_wait"] == "slots"
    tables = [table_of(shards) for shards in task["shards"]]
    own: dict[tuple[str, int], float] = {}
    for run in runs:
        budget = budget_of(tables[0], task["m_mem"], 1.0, step_time)
        planner = BucketPlanner(tables[0], budget, run.balance, dp_size, run.micro_batches, step_time)
        key, m_comp = (run.balance, run.micro_batches), task["m_comp"]
        if run.m_comp_of == "own":
            m_comp = own[key] = own.get(key) or best_m_comp(planner, in_slots)
        budget = budget_of(tables[0], task["m_mem"], m_comp, step_time)
        yield run, m_comp, replace(planner, table=tables[run.draw], budget=budget)


def measure(runs: list[list[Any]], done: dict[str, Any], **task: Any) -> None:
    """All runs in one process group; after each, rank 0 writes what there is."""
    is_first = os.environ["RANK"] == "0"
    rows: list[Row] = done["rows"]
    costs = done["settings"] if "cost" in done["settings"] else costs_of(task)
    settings = task["settings"] | {name: costs[name] for name in ("cost", "cost_table")}
    if is_first:
        write(task, settings, rows)
    step_time = StepTimeModel.from_dict(settings["cost"])
    planned = list(planners_of([Run(*run) for run in runs], step_time, task))
    cells = cells_of((planner, run.warm_up + run.steps) for run, _, planner in planned)
    rehearse(task["config"], cells, strategy_of(task["strategy"], task["ulysses"]), task["tiny"])
    for run, m_comp, planner in planned:
        if is_first:
            epoch = planner.plan(epoch=0)
            seconds = epoch.cost[epoch.grid[: run.warm_up + run.steps]].sum(axis=2).max(axis=1).sum()
            say(f"{run.name}: about {seconds:.0f} s")
        report = None if task["reports"] is None else Path(task["reports"]) / run.name
        network, strategy = module_of(task["config"]), strategy_of(task["strategy"], task["ulysses"])
        columns = train(
            task["shards"][run.draw], planner, run.steps, run.warm_up, network, strategy, task["tiny"], report
        )
        if is_first:
            figures, of_runs = PlanFigures.of(epoch), ("ranks", "strategy", "ulysses_size", "layers")
            rows.append(
                {name: settings[name] for name in of_runs}
                | {"draw": run.draw, "m_comp_of": run.m_comp_of}
                | {"m_comp_over_longest": None if run.m_comp_of is None else m_comp}
                | {"epoch_ceiling_tokens_per_second": figures.tokens_per_cost / figures.efficiency}
                | row_of(run.balance, run.micro_batches, columns, task["settings"]["ranks_wait"])
            )
            write(task, settings, rows)
            show(rows[-1])
    finish(len(rows))


def costs_of(task: Task) -> dict[str, Any]:
    """The model of the step time and the table that it is fitted to, measured under the runs' strategy; collective."""
    module, shapes = module_of(task["config"]), [ClipShape(*shape) for shape in task["shapes"]]
    strategy, part = strategy_of(task["strategy"], task["ulysses"]), Path(task["output"]).with_suffix(".costs")
    matrix = matrix_of(module, shapes, task["seconds"], task["tiny"], strategy, task["max_tokens"], part)
    if task["tiny"]:
        # Times of a tiny model on busy CPUs need not even grow with its work.
        model = StepTimeModel.analytic(TransformerFlops.from_config(module.transformer.config), 1e9)
        times = [float(model.predict(row.samples, row.sequence_length)) for row in matrix.rows]
        matrix = replace(matrix, rows=tuple(replace(r, seconds=t) for r, t in zip(matrix.rows, times, strict=True)))
    else:
        model = StepTimeModel.fit(matrix.measurements)
    if os.environ["RANK"] == "0":
        part.unlink()
        say(f"cost: {model.to_dict()}")
    names = ("outcome", "samples", "sequence_length", "seconds", "spread", "wait_seconds", "peak_bytes")
    return {"cost": model.to_dict(), "cost_table": [{name: getattr(r, name) for name in names} for r in matrix.rows]}


def cells_of(plans: Iterable[tuple[BucketPlanner, int]]) -> list[Cell]:
    """All different micro-batches of the first steps, so many of each plan, the longest first."""
    cells: set[Cell] = set()
    for planner, steps in plans:
        epoch = planner.plan(epoch=0)
        samples, table = np.diff(epoch.starts), epoch.table
        chosen = np.ravel(epoch.grid[:steps])
        shapes = epoch.shape_id[chosen]
        cells |= {
            Cell(table.shapes[shape], int(table.sequence_lengths[shape]), int(count))
            for shape, count in zip(shapes, samples[chosen], strict=True)
        }
    return sorted(cells, key=lambda cell: (-cell.tokens, cell))


def write(task: Task, settings: dict[str, Any], rows: list[Row]) -> None:
    """The rows so far, each beside equal_token's where there is one."""
    speeds = [row["share_of_ceiling"] * row["epoch_ceiling_tokens_per_second"] for row in rows]
    keys = [(row["micro_batches"], row["draw"]) for row in rows]
    base = {key: s for key, s, row in zip(keys, speeds, rows, strict=True) if row["balance"] == "equal_token"}
    for key, speed, row in zip(keys, speeds, rows, strict=True):
        if key in base:
            row["over_equal_token"] = speed / base[key]
    provenance.write(Path(task["output"]), "data/balances", task["commit"], settings, rows)


def show(row: Row) -> None:
    say(
        f"{row['balance']:16} K={row['micro_batches']}: {row['tokens_per_second']:9.0f} tokens/s, "
        f"{row.get('over_equal_token', float('nan')):.3f} x equal_token, {row['share_of_ceiling']:.1%} of the ceiling, "
        f"CV_step {row['cv_step_mean']:.1%} (median {row['cv_step_median']:.1%}, p95 {row['cv_step_p95']:.1%}), "
        f"cost CV {row['cost_cv']:.1%}, B·S² CV {row['b_s2_cv']:.1%}, cost error {row['cost_error_median']:.1%}, "
        f"behind the slowest {row['behind_slowest_share']:.1%}, "
        f"{row['steps']} steps of {row['step_seconds_median']:.3f} s"
    )


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a file share, but for the costs."""
    return {
        "dry_run": options.tiny,
        "ranks": options.ranks,
        "strategy": options.strategy,
        "ulysses_size": options.ulysses,
        "layers": options.layers,
        "model": TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers},
        "ranks_wait": waits_of(options.strategy),
        "fused": True,
        "attention": "flash",
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "mix": {"samples": options.samples, "draws": DRAWS, "table": provenance.table(options.shapes)},
        "longest": options.longest,
        "longest_cost": options.longest_cost,
        "m_mem_over_longest": options.m_mem,
        "m_comp_common_over_longest": options.m_comp,
        "warm_up_micro_batches": WARM_UP,
    }


def shards_of_draw(folder: Path, clips: Clips, draw: int, options: argparse.Namespace) -> str:
    """Writes and indexes the samples of a draw; returns the pattern of their shards."""
    table = table_of_draw(clips, options.samples, draw, options.longest, options.tiny)
    (own := folder / str(draw)).mkdir()
    shards = write_sparse_shards(own, latents_of_draw(table), shards=32)
    VideoDataModule(shards).prepare_data()
    say(f"{len(table)} samples of draw {draw} are indexed")
    return shards


def main() -> None:
    parser = provenance.parser(__doc__, output="file to write, or to go on with")
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="ulysses_ddp")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--layers", type=int, default=30, help="of Wan-1.3B's 30")
    parser.add_argument("--longest", type=int, default=32_760, help="tokens; longer samples are left out")
    parser.add_argument("--longest-cost", type=int, help="tokens up to which costs are measured; left out, --longest")
    parser.add_argument("--m-mem", type=float, default=2.0, help="in multiples of the longest sample")
    parser.add_argument("--m-comp", type=float, default=1.0, help="that is common, likewise, to the power p")
    parser.add_argument("--m-comp-of", nargs="+", choices=M_COMP_OF, default=["own"], help="whose M_comp runs have")
    parser.add_argument("--balances", nargs="+", choices=BALANCES, default=list(BALANCES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="values of K")
    parser.add_argument("--steps", type=int, nargs="+", default=[15], help="that count, of a run with each K")
    parser.add_argument("--draws", type=int, nargs="+", choices=range(DRAWS), default=list(range(DRAWS)))
    parser.add_argument(
        "--samples", type=int, default=6000, help="of each draw of the mix, before long ones are left out"
    )
    parser.add_argument("--reports", type=Path, help="folder for the report of each run")
    parser.add_argument("--seconds", type=float, default=0.3, help="per shape of the cost model's measurement")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    options.longest_cost = max(options.longest, options.longest_cost or 0)
    if len(options.steps) != len(options.micro_batches):
        parser.error(f"--steps {options.steps} are not one for each K of {options.micro_batches}.")
    if options.ranks % options.ulysses:
        parser.error(f"{options.ranks} ranks make no groups of --ulysses {options.ulysses}.")
    commit = options.commit or provenance.commit()
    suffix = f"{'_fsdp2' * (options.strategy == 'ulysses_fsdp2')}{f'_sp{options.ulysses}' * (options.ulysses > 1)}"
    output = (options.output or provenance.path("data", f"balances{suffix}")).absolute()
    settings = settings_of(options)
    done = json.loads(output.read_text()) if output.exists() else {"rows": [], "settings": {}}
    if done["settings"] and (other := provenance.differences(done, "data/balances", settings)):
        parser.error(f"{output} holds runs of other {', '.join(other)}: name another --output.")
    steps = dict(zip(options.micro_batches, options.steps, strict=True))
    found = {(row["balance"], row["micro_batches"], row["m_comp_of"], row["draw"]) for row in done["rows"]}
    runs = [run for run in runs_of(options.balances, steps, options.m_comp_of, options.draws) if run[:4] not in found]
    if not runs:
        parser.exit(message=f"{output} has all runs already.\n")
    clips = Clips.from_csv(options.shapes)
    of_costs = table_of_draw(clips, options.samples, None, options.longest_cost, options.tiny)
    lengths = of_costs.sequence_lengths
    longest = int(lengths[lengths <= options.longest].max())
    with tempfile.TemporaryDirectory() as folder:
        shards = [shards_of_draw(Path(folder), clips, draw, options) for draw in range(DRAWS)]
        launch(
            __file__,
            options.ranks,
            runs=runs,
            done=done,
            shards=shards,
            shapes=[latents_of(shape) for shape in of_costs.shapes],
            max_tokens=max(int(lengths.max()), round(options.m_mem * longest)),
            config=settings["model"],
            settings=settings,
            reports=None if options.reports is None else str(options.reports.absolute()),
            output=str(output),
            commit=commit,
            **{name: getattr(options, name) for name in ("strategy", "ulysses", "m_mem", "m_comp", "seconds", "tiny")},
        )
    print(f"written to {output}")


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
