"""Simulates balances on whole epochs and up to 1 024 ranks, from what `data/balances.py` measured on a few.

    python benchmarks/predictions/replayed_balances.py benchmarks/results/data/balances-h100x2.json --shapes clips.csv
    python benchmarks/predictions/replayed_balances.py benchmarks/results/data/balances-h100x2.json --shapes clips.csv \
        --longest 75600 --m-mem 2 4 --output mix.json

Nothing here is measured. `replay` beside this has the formula. Rows of kind ``check`` replay the very steps of the
measured runs, with what the other runs of one micro-batch took beside it, and say how far off that is. Rows of kind
``replay`` are whole epochs under the planner's own plans: on 2 and 4 ranks, and on as many as nobody has tried. There
are two draws that share no clip. M_comp is each balance's own best on so many ranks, or the same for all, as in the
measured runs; `equal_token` has none.

Beside the measured lengths and M_mem, others may be asked for. What is longer than all that was measured, and batches
of more tokens, follow the fit to the table. What steps take beside their micro-batches is that of the measured ranks:
more ranks exchange more, which is not in here but in `scaling`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.balance_figures import Waits, figures_of
from benchmarks.data.balance_mix import DRAWS, table_of_draw
from benchmarks.data.balance_training import budget_of
from benchmarks.data.balances import BALANCES, M_COMP_OF, best_m_comp
from benchmarks.launch import say
from benchmarks.predictions.replay import Replay, replay_of
from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.data.planning import BucketPlanner, SampleTable
from lightning_videoscale.data.planning.shapes import Clips

Row = dict[str, Any]
NOISES = 20
WITHIN = 0.02
MANY = 64  # ranks above which epochs are five times as long
NAMES = ("balance", "micro_batches", "strategy", "ulysses_size", "layers", "draw", "m_comp_of", "m_comp_over_longest")
COMPARED = ("tokens_per_second", "share_of_ceiling", "cv_step_mean", "cv_step_median", "cv_step_p95")
KEPT = (
    *("steps", "tokens_per_second", "ceiling_tokens_per_second", "share_of_ceiling", "cv_step_mean", "cv_step_median"),
    *("cv_step_p95", "cv_slot_mean", "compute_cv", "cost_cv", "b_s2_cv", "behind_slowest_share"),
)


class Mix(NamedTuple):
    """What is trained on.

    Attributes:
        longest: Tokens of the longest samples that take part.
        m_mem: In multiples of the longest sample.
        tables: Of each draw.
    """

    longest: int
    m_mem: float
    tables: Sequence[SampleTable]


def checks(rows: Sequence[Row], table: Sequence[Row], step_time: StepTimeModel, waits: Waits) -> Iterator[Row]:
    """The steps of each measured run, replayed by the table of costs and the other runs: means over the noise."""
    for row in rows:
        replay = replay_of(table, rows, step_time, waits, but=row)
        overhead = replay.overhead(rows, row["micro_batches"], but=row)
        found = [
            figures_of(replay.of_row(row, overhead, np.random.default_rng(seed)), replay.waits)
            for seed in range(NOISES)
        ]
        replayed = {name: float(np.mean([figures[name] for figures in found])) for name in COMPARED}
        yield (
            {"kind": "check", "ranks": row["ranks"] // row["ulysses_size"]}
            | {name: row[name] for name in NAMES}
            | {"steps": row["steps"], "measured": {name: row[name] for name in COMPARED}, "replayed": replayed}
            | {"error": replayed["tokens_per_second"] / row["tokens_per_second"] - 1}
            | {"overhead_s": overhead, "ahead": replay.ahead, "compute_over_table": replay.drift(row)}
            | {"error_of_waits": replay.error_of_waits(row, overhead)}
        )


def epochs(
    mix: Mix, ranks: int, micro_batches: int, replay: Replay, overhead: float, m_comps: dict[str, float | None]
) -> Iterator[Row]:
    """Every balance on whole epochs, beside equal_token on the same draw; of ``m_comps``, None is its own best."""
    smallest = budget_of(mix.tables[0], mix.m_mem, 1.0, replay.step_time)
    base: dict[int, float] = {}
    for balance in BALANCES:  # equal_token first
        planner = BucketPlanner(mix.tables[0], smallest, balance, ranks, micro_batches, replay.step_time)
        for of, given in m_comps.items() if balance != "equal_token" else [(None, 1.0)]:
            m_comp = best_m_comp(planner, replay.waits == "slots") if given is None else given
            budget = budget_of(mix.tables[0], mix.m_mem, m_comp, replay.step_time)
            for draw, table in enumerate(mix.tables):
                plan = replace(planner, table=table, budget=budget).plan(epoch=0)
                found = figures_of(replay.of_plan(plan, overhead, np.random.default_rng(draw)), replay.waits)
                speed = found["tokens_per_second"]
                yield {
                    "kind": "replay", "ranks": ranks, "balance": balance, "micro_batches": micro_batches,
                    "longest": mix.longest, "m_mem_over_longest": mix.m_mem, "draw": draw, "m_comp_of": of,
                    "m_comp_over_longest": None if of is None else m_comp,
                    **{name: found[name] for name in KEPT},
                    "over_equal_token": speed / base.setdefault(draw, speed), "overhead_s": overhead,
                }  # fmt: skip


def replays(result: dict[str, Any], clips: Clips, replay: Replay, options: argparse.Namespace) -> Iterator[Row]:
    """All epochs that are asked for."""
    settings = result["settings"]
    m_comps = dict(zip(M_COMP_OF, (None, settings["m_comp_common_over_longest"]), strict=True))
    for longest in options.longest or [settings["longest"]]:
        tables = {
            times: [
                table_of_draw(clips, times * options.samples, d, longest, settings["dry_run"]) for d in range(DRAWS)
            ]
            for times in {_times(ranks) for ranks in options.ranks}
        }
        for m_mem in options.m_mem or [settings["m_mem_over_longest"]]:
            for ranks, k in product(options.ranks, options.micro_batches):
                overhead = replay.overhead(result["rows"], k)
                yield from epochs(Mix(longest, m_mem, tables[_times(ranks)]), ranks, k, replay, overhead, m_comps)


def _times(ranks: int) -> int:
    """How many times as long an epoch of many ranks is."""
    return 5 if ranks > MANY else 1


def show(row: Row) -> None:
    named = f"{row['balance']:16} K={row['micro_batches']} {row['ranks']:4} ranks, draw {row['draw']}"
    if row["m_comp_of"] is not None:
        named += f", {row['m_comp_of']} M_comp {row['m_comp_over_longest']:g} x"
    if row["kind"] == "check":
        measured, replayed = row["measured"], row["replayed"]
        say(
            f"{named}: measured {measured['tokens_per_second']:.0f} tokens/s, replayed {row['error']:+.1%}, "
            f"CV_step {measured['cv_step_mean']:.1%} and {replayed['cv_step_mean']:.1%}, "
            f"micro-batches took {row['compute_over_table']:.3f} x the table's time, "
            f"error by waits alone {row['error_of_waits']:+.1%}"
        )
    else:
        say(
            f"{named}, longest {row['longest']}, M_mem {row['m_mem_over_longest']:g} x: "
            f"{row['tokens_per_second']:.0f} tokens/s, {row['over_equal_token']:.3f} x equal_token, "
            f"{row['share_of_ceiling']:.1%} of the ceiling, CV_step {row['cv_step_mean']:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="file of data/balances.py")
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64, 1024], help="data-parallel ranks")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="values of K")
    parser.add_argument("--longest", type=int, nargs="+", help="tokens; left out, as measured")
    parser.add_argument("--m-mem", type=float, nargs="+", help="in multiples of the longest sample; likewise")
    parser.add_argument("--samples", type=int, default=200_000, help=f"of a draw, five times for over {MANY} ranks")
    parser.add_argument("--output", type=Path, help="file to write; left out, one under benchmarks/results")
    parser.add_argument("--commit", help="the commit, where the folder is no git checkout")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    result = json.loads(options.result.read_text())
    settings, table = result["settings"], provenance.table(options.shapes)
    if "cost_table" not in settings or settings["mix"]["table"] != table:
        parser.error(f"{options.result} has no table of costs, or is of other clips than {options.shapes}.")
    costs, step_time = settings["cost_table"], StepTimeModel.from_dict(settings["cost"])
    replay = replay_of(costs, result["rows"], step_time, settings["ranks_wait"])
    rows = []
    for row in checks(result["rows"], costs, step_time, replay.waits):
        rows.append(row)
        show(row)
    if rows:
        worst = max((row["error"] for row in rows), key=abs)
        verdict = "within" if abs(worst) <= WITHIN else "not within"
        say(f"the worst of {len(rows)} checks is {worst:+.2%}, {verdict} {WITHIN:.0%}")
    for row in replays(result, Clips.from_csv(options.shapes), replay, options):
        rows.append(row)
        show(row)
    of = f"{result['machine']['gpu'] or 'CPU'}, {settings['layers']} blocks of Wan-1.3B, {settings['strategy']}"
    written = {
        "kind": "prediction", "of": of, "note": "only what checks compare with is measured",
        "dry_run": settings["dry_run"], "samples": options.samples, "table": table,
        "inputs": {options.result.name: hashlib.sha256(options.result.read_bytes()).hexdigest()},
        "measured_commit": result["commit"], "noises": NOISES, "ranks_wait": replay.waits,
        "ahead": replay.ahead,
    }  # fmt: skip
    name = f"replayed_{options.result.name}"
    output = options.output or provenance.RESULTS / "predictions" / name
    provenance.write(output, "predictions/replayed_balances", commit, written, rows)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
