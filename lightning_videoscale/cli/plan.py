"""`videoscale plan`: what a balance would do on some clips and ranks, before a GPU is paid for.

With ``--layout``, how ranks that share a sequence best divide; see `layout`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lightning_videoscale.cli.layout import print_layouts
from lightning_videoscale.cli.parsers.plan import LONGEST
from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.loading.data_warnings import oversized_shapes
from lightning_videoscale.data.planning import Balance, BucketPlanner, EpochPlan, SampleTable
from lightning_videoscale.data.planning.compute_budget import TriedBudget, best_of, try_budgets
from lightning_videoscale.data.planning.diversity import ENOUGH
from lightning_videoscale.data.planning.figures import PlanFigures
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ShapePolicy, standard_mix
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.index_table import IndexTable

_FEW_STEPS = 10
"""Below as many steps, the last one and its fillers alone move every mean."""

_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = {
    "steps": "steps",
    "cv_step": "CV_step",
    "compute_cv": "Compute CV (B·S²)",
    "cost_cv": "cost CV",
    "efficiency": "mean / max",
    "slot_time": "time by slots / ideal",
    "padding": "padding",
    "diversity": "diversity",
    "delay_p99": "delay p99, steps",
    "tokens_per_cost": "predicted tokens/s",
}
_TRIED = {"efficiency": "mean/max", "cv_step": "CV_step", "diversity": "diversity", "tokens_per_cost": "tokens/s"}


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    has_clips = options.shapes is not None or options.index is not None
    if not has_clips and not options.layout:
        raise argparse.ArgumentError(None, "one of the arguments --shapes --index is required")
    try:
        if options.layout:
            print_layouts(options, _table(options).samples_by_length() if has_clips else None)
            return 0
        table, step_time = _table(options), _step_time(options)
        law = step_time.power_law
        budget = BucketBudget(options.m_mem, LONGEST**law.p if options.m_comp is None else options.m_comp, law.p)
        planner = BucketPlanner(
            table,
            budget,
            options.balance or "planned",
            options.dp_size,
            options.micro_batches,
            step_time,
            seed=options.seed,
            min_diversity=options.min_diversity,
        )
        tried = try_budgets(planner) if options.best_m_comp else []
        if tried:
            planner = replace(planner, budget=best_of(tried).budget)
        balances: Sequence[Balance] = [options.balance] if options.balance else get_args(Balance)[::-1]
        plans = {balance: replace(planner, balance=balance).plan(epoch=0) for balance in balances}
        if said := oversized_shapes(table, budget):
            Console(stderr=True, soft_wrap=True).print(said, style="yellow", markup=False)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    figures = {balance: PlanFigures.of(plan) for balance, plan in plans.items()}
    if options.json:
        rows: dict[str, Any] = {balance: found.to_dict() for balance, found in figures.items()}
        report = {"balance": options.balance, **rows[options.balance]} if options.balance else rows
        if tried:
            report["m_comp"] = best_of(tried).budget.m_comp
            report["tried"] = [{"m_comp": each.budget.m_comp, **each.figures.to_dict()} for each in tried]
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        console = Console(soft_wrap=True, highlight=False)
        if tried:
            _print_tried(console, tried, planner)
        _print(console, figures, plans, planner.budget, step_time)
        _print_choice(console, figures, planner)
        _print_caveats(console, figures, has_tried=bool(tried))
    return 0


def _table(options: argparse.Namespace) -> SampleTable:
    """The samples, in the shapes that they would be trained in."""
    shard = None
    if options.shapes is not None:
        clips = Clips.from_csv(options.shapes)
    elif not IndexTable(options.index).exists:
        raise ValueError(f"No index at {options.index}: name the one that `videoscale index SHARDS` has written.")
    else:
        index = ShardIndex.load(options.index)
        clips, shard = index.samples.clips, index.shard_numbers
    policy = ShapePolicy()
    if options.standard_mix:
        clips, shard, policy = standard_mix(clips, options.samples, options.seed), None, STANDARD_POLICY
    table = SampleTable.of_clips(clips, policy, GEOMETRIES[options.geometry], options.seed, shard)
    if not (table.shape_id >= 0).any():
        raise ValueError(f"None of the {len(clips)} clips can be trained on: all are smaller than one patch, or empty.")
    return table


def _step_time(options: argparse.Namespace) -> StepTimeModel:
    if options.cost is None:
        return StepTimeModel.analytic(TRANSFORMERS[options.transformer], longest=LONGEST)
    try:
        content = json.loads(options.cost.read_text(encoding="utf-8"))
        if "rows" not in content:
            return StepTimeModel.from_dict(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{options.cost} is neither a matrix of `videoscale benchmark-shapes` nor a step-time model: {error!r}."
        ) from error
    return StepTimeModel.fit(ShapeMatrix.load(options.cost).measurements)


def _print_tried(console: Console, tried: Sequence[TriedBudget], chosen: BucketPlanner) -> None:
    console.print(f"M_comp for {chosen.balance}, on {tried[0].figures.samples} of the samples:")
    table = Table("", "M_comp", *_TRIED.values(), "")
    for each in tried:
        budget, figures = each.budget, each.figures.to_dict()
        note = "chosen" if budget == chosen.budget else "" if each.is_diverse else "too alike"
        numbers = (f"{figures[name]:.4g}" for name in _TRIED)
        table.add_row(f"{each.factor:.2f} x", f"{budget.m_comp:.4g}", *numbers, note)
    console.print(table)


def _print(
    console: Console,
    figures: dict[Balance, PlanFigures],
    plans: dict[Balance, EpochPlan],
    budget: Budget,
    step_time: StepTimeModel,
) -> None:
    first = next(iter(plans.values()))
    _, ranks, micro_batches = first.grid.shape
    console.print(
        f"{len(first.stream)} samples of {len(first.table.shapes)} shapes on {ranks} data-parallel ranks, "
        f"{micro_batches} micro-batches a step. M_mem = {budget.m_mem:g} tokens, {budget}; "
        f"costs predicted by the {'sum' if step_time.form is step_time.additive else 'power law'}."
    )
    table = Table("", *figures)
    for name, title in _ROWS.items():
        table.add_row(title, *(f"{found.to_dict()[name]:.4g}" for found in figures.values()))
    console.print(table)
    console.print("Cost of the ranks in one step, the median in balance:")
    for balance, plan in plans.items():
        console.print(f"  {balance:<16} {_draw(plan.cost[plan.grid].sum(axis=2))}")


def _print_choice(console: Console, figures: dict[Balance, PlanFigures], planner: BucketPlanner) -> None:
    """Where equal costs leave fewer shapes in a step than are aimed at: what the other choice would be."""
    found = figures.get("planned")
    if found is None or planner.min_diversity is not None or found.diversity >= ENOUGH or found.steps < _FEW_STEPS:
        return
    other = PlanFigures.of(replace(planner, min_diversity=ENOUGH).plan(epoch=0))
    console.print(
        "Steps of planned are less diverse than random ones: equal costs go first. What goes first can be chosen:"
    )
    table = Table("planned", *_TRIED.values())
    for name, each in (("equal costs first", found), (f"--min-diversity {ENOUGH}", other)):
        table.add_row(name, *(f"{each.to_dict()[figure]:.4g}" for figure in _TRIED))
    console.print(table)


def _print_caveats(console: Console, figures: dict[Balance, PlanFigures], has_tried: bool) -> None:
    """Says what the figures do not mean."""
    fewest = min(found.steps for found in figures.values())
    if fewest < _FEW_STEPS:
        samples = next(iter(figures.values())).samples
        console.print(
            f"Figures of so few mean little: {samples} samples make {fewest} step{'s' * (fewest > 1)}, and how well "
            "they divide by the ranks decides. Plan on more clips, or on fewer ranks (--dp-size)."
        )
    if not has_tried and "planned" in figures and "equal_token" in figures:
        faster = figures["equal_token"].tokens_per_cost / figures["planned"].tokens_per_cost - 1
        if faster > 0:
            console.print(
                f"equal_token is {faster:.1%} faster here since M_comp does not limit its micro-batches; "
                "--best-m-comp tries larger ones for planned."
            )


def _draw(costs: NDArray[np.float64], width: int = 96) -> str:
    """One bar per rank for the step whose spread is the median of all; ``costs`` is (steps, ranks)."""
    spread = costs.std(axis=1) / costs.mean(axis=1)
    step = costs[np.argsort(spread, kind="stable")[len(spread) // 2]][:width]
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in step / step.max())
