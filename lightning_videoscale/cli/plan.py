"""`videoscale plan`: what a balance would do on some clips and ranks, before a GPU is paid for.

With ``--layout``, how ranks that share a sequence best divide; see `layout`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.cli.layout import print_layouts
from lightning_videoscale.cli.parsers.plan import LONGEST
from lightning_videoscale.cli.plan_clips import read_clips
from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.spread import compute_cv
from lightning_videoscale.data.loading.data_warnings import oversized_shapes
from lightning_videoscale.data.planning import Balance, BucketPlanner
from lightning_videoscale.data.planning.compute_budget import TriedBudget, best_of, try_budgets
from lightning_videoscale.data.planning.diversity import ENOUGH
from lightning_videoscale.data.planning.figures import FigureSums, PlanFigures

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
    "least_weight": "a sample's weight, least",
    "most_weight": "a sample's weight, most",
    "delay_p99": "delay p99, steps",
    "tokens_per_cost": "predicted tokens/s",
}
_TRIED = {"efficiency": "mean/max", "cv_step": "CV_step", "diversity": "diversity", "tokens_per_cost": "tokens/s"}


class _Epoch(NamedTuple):
    """What is shown of an epoch under one balance: its figures, and predicted costs (steps, ranks)."""

    figures: PlanFigures
    costs: NDArray[np.float64]


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    _check(options)
    try:
        if options.layout:
            has_clips = options.shapes is not None or options.index is not None
            print_layouts(options, read_clips(options).table.samples_by_length() if has_clips else None)
            return 0
        (table, windows), step_time = read_clips(options), _step_time(options)
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
            windows=windows,
        )
        tried = try_budgets(planner) if options.best_m_comp else []
        if tried:
            planner = replace(planner, budget=best_of(tried).budget)
        balances: Sequence[Balance] = [options.balance] if options.balance else get_args(Balance)[::-1]
        epochs = {balance: _planned(replace(planner, balance=balance), balance) for balance in balances}
        if said := oversized_shapes(table, budget):
            Console(stderr=True, soft_wrap=True).print(said, style="yellow", markup=False)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    figures = {balance: epoch.figures for balance, epoch in epochs.items()}
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
        _print(console, epochs, planner, step_time)
        _print_choice(console, figures, planner)
        _print_caveats(console, figures, has_tried=bool(tried))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ArgumentError for options that do not go together."""
    if options.shapes is None and options.index is None and not options.layout:
        raise argparse.ArgumentError(None, "one of the arguments --shapes --index is required")
    if options.window is not None and (options.index is None or options.standard_mix):
        raise argparse.ArgumentError(
            None, f"--window {options.window} plans windows of shards: it needs --index, and no --standard-mix"
        )


def _planned(planner: BucketPlanner, what: str) -> _Epoch:
    """Plans the first epoch, window by window with a bar; of windows, one is in memory at a time."""
    sums, costs = FigureSums(), np.empty((0, planner.dp_size))
    windows = 1 if planner.windows is None else planner.windows.count
    for plan in tqdm(planner.plans(0), what, windows, unit=" windows", disable=windows == 1, leave=False):
        sums.add(plan)
        if not len(costs):
            costs = plan.cost[plan.grid].sum(axis=2)
    return _Epoch(sums.figures(), costs)


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


def _print(console: Console, epochs: dict[Balance, _Epoch], planner: BucketPlanner, step_time: StepTimeModel) -> None:
    figures = {balance: epoch.figures for balance, epoch in epochs.items()}
    samples, windows = next(iter(figures.values())).samples, planner.windows
    divided = f"of {len(planner.table.shapes)} shapes" if windows is None else f"in {windows.count} windows"
    console.print(
        f"{samples} samples {divided} on {planner.dp_size} data-parallel ranks, {planner.micro_batches} micro-batches "
        f"a step. M_mem = {planner.budget.m_mem:g} tokens, {planner.budget}; "
        f"costs predicted by the {'sum' if step_time.form is step_time.additive else 'power law'}."
    )
    table = Table("", *figures)
    for name, title in _ROWS.items():
        table.add_row(title, *(f"{found.to_dict()[name]:.4g}" for found in figures.values()))
    console.print(table)
    where = "" if windows is None else " of the first window"
    console.print(f"Cost of the ranks in one step{where}, the median in balance:")
    for balance, epoch in epochs.items():
        console.print(f"  {balance:<16} {_draw(epoch.costs)}")


def _print_choice(console: Console, figures: dict[Balance, PlanFigures], planner: BucketPlanner) -> None:
    """Where equal costs leave fewer shapes in a step than are aimed at: what the other choice would be."""
    found = figures.get("planned")
    if found is None or planner.min_diversity is not None or found.diversity >= ENOUGH or found.steps < _FEW_STEPS:
        return
    other = _planned(replace(planner, balance="planned", min_diversity=ENOUGH), f"--min-diversity {ENOUGH}").figures
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
    order = compute_cv(torch.from_numpy(costs.T)).argsort(stable=True)
    step = costs[int(order[len(order) // 2])][:width]
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in step / step.max())
