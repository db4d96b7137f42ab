"""The sections of the page, each from the findings to what the template shows; None leaves a section out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.report.charts import (
    Line,
    Scale,
    Sign,
    distributions,
    duration,
    line_chart,
    number,
    percent,
    stacked_bars,
)
from lightning_videoscale.report.costs import ShapeTimes, buckets_of
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.graphs import graph_figures

Section = dict[str, Any]

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "wait": "wait for ranks",
    "exchange": "exchange",
    "data": "wait for data",
    "optimizer": "optimizer",
    "other": "between steps",
}
_SHOWN_RANKS = 32
_SHOWN_BUCKETS = 12

_WIDTH = 0.3
"""How far lengths are about alike: a third more or less."""


def loss(found: Findings) -> Section | None:
    """The mean loss of every window, and the losses of validations."""
    points = [(w["step"], w["loss"]) for w in found.windows if w.get("loss") is not None]
    if not points:
        return None
    lines = [Line("training", "own", points)]
    validations: dict[str, list[tuple[float, float]]] = {}
    for record in found.run.of("val_loss"):
        for name, value in record["losses"].items():
            if value is not None:
                validations.setdefault(name, []).append((record["step"], value))
    styles = cycle(("fit", "predicted", "part-exchange", "part-optimizer"))
    lines += [Line(name, style, seen) for (name, seen), style in zip(validations.items(), styles, strict=False)]
    everything = [point for line in lines for point in line.points]
    y = Scale.over([value for _, value in everything], title="loss")
    return {
        "chart": line_chart("Loss over optimizer steps", lines, _steps(everything), y),
        "first": points[0],
        "last": points[-1],
        "validated": bool(validations),
    }


def throughput(found: Findings) -> Section | None:
    """Tokens per second over steps."""
    points = [(w["step"], w["tokens"] / w["seconds"]) for w in found.windows if w["tokens"] is not None]
    if not points:
        return None
    signs = [Sign(plan["step"], "new budget or model") for plan in found.plans[1:] if plan["step"] > 0]
    signs += [Sign(start["step"], "resumed") for start in found.run.of("start")[1:]]
    if found.drift is not None:
        signs.append(Sign(found.drift.step, "lower from here on"))
    x, y = _steps(points), Scale.over([value for _, value in points], from_zero=True, title="tokens per second")
    return {
        "chart": line_chart("Tokens per second over optimizer steps", [Line("tokens/s", "own", points)], x, y, signs),
        "best": max(value for _, value in points),
        "signs": list(dict.fromkeys(sign.text for sign in signs)),
    }


def balance(found: Findings) -> Section | None:
    """CV_step and Compute CV of the run's steps beside those of the three balances on the same clips."""
    if found.data_parallel_ranks == 1 or not found.windows:
        return None
    own = {name: found.per_step(name) for name in ("cv_step", "compute_cv", "cost_cv")}
    predicted = found.predicted
    rows = [("this run", "measured", {name: values for name, values in own.items() if len(values)}, found.compute_idle)]
    rows += [
        (name, "predicted", {figure: getattr(spreads, figure) for figure in own}, float(spreads.idle.mean()))
        for name, spreads in predicted.items()
    ]
    charts = {}
    figures = (
        ("cv_step", "CV_step", "(max - min) / max of the ranks' work, per step"),
        ("compute_cv", "Compute CV of B·S²", "std / mean of the ranks' B·S², per step"),
    )
    for figure, title, axis in figures:
        drawn = [
            (name, how, "own" if how == "measured" else "predicted", values[figure].tolist())
            for name, how, values, _ in rows
            if figure in values
        ]
        if drawn:
            charts[title] = distributions(f"{title} of every step: {_medians(drawn)}", drawn, axis)
    table = [
        (name, how, *(percent(float(np.median(values[f]))) if f in values else "not told" for f in own), percent(idle))
        for name, how, values, idle in rows
    ]
    return {
        "charts": charts,
        "rows": table,
        "predicted": bool(predicted),
        "balance": found.plans[-1]["balance"] if found.plans else None,
        "judged_by_run": found.model is not None,
    }


def anatomy(found: Findings) -> Section | None:
    """Where the time of the ranks went."""
    parts = found.parts()
    if not parts:
        return None
    names = {part: title for part, title in PARTS.items() if sum(parts[part]) > 0}
    ranks = range(len(parts["forward"]))
    compute = [parts["forward"][rank] + parts["backward"][rank] for rank in ranks]
    shown = list(ranks)
    if len(ranks) > _SHOWN_RANKS:
        by_compute = sorted(ranks, key=lambda rank: -compute[rank])
        shown = by_compute[: _SHOWN_RANKS // 2] + by_compute[-_SHOWN_RANKS // 2 :]
    bars = [(f"rank {rank}", [parts[part][rank] for part in names]) for rank in shown]
    total = sum(map(sum, parts.values()))
    return {
        "chart": stacked_bars(
            "Time of every rank by part of the step",
            bars,
            [(title, f"part-{part}") for part, title in names.items()],
            "time in the run",
        ),
        "rows": [(title, percent(sum(parts[part]) / total), f"part-{part}") for part, title in names.items()],
        "hidden": len(ranks) - len(shown),
    }


def buckets(found: Findings) -> Section | None:
    """What was trained of every shape, and the batch sizes of the budget."""
    rows = buckets_of(found.kinds, found.plans, found.model)
    if not rows:
        return None
    return {
        "rows": rows[:_SHOWN_BUCKETS],
        "more": rows[_SHOWN_BUCKETS:],
        "changed": any(row.before != row.after for row in rows),
        "planned": bool(found.plans),
        "predicted": found.model is not None,
    }


def cost(found: Findings) -> Section | None:
    """The fitted cost curve over measured points."""
    kinds, model = found.comparable_kinds, found.model
    if not kinds:
        return None
    points = [(kind.tokens, kind.seconds / kind.samples) for kind in kinds]
    lines = []
    if model is not None:
        low, high = min(kind.tokens for kind in kinds), max(kind.tokens for kind in kinds)
        lengths = np.geomspace(low, high, 60)
        # A micro-batch's fixed seconds are shared by its samples, as many as there are of lengths about alike.
        samples = _samples_around(lengths, kinds)
        curve = model.predict(samples, lengths) / samples
        lines.append(Line("fitted to this run", "fit", list(zip(lengths.tolist(), curve.tolist(), strict=True))))
    lines.append(Line("measured", "own", points, joined=False))
    everything = [point for line in lines for point in line.points]
    x = Scale.over([a for a, _ in everything], log=True, title="tokens of a sample, S")
    y = Scale.over([b for _, b in everything], unit=" s", log=True, title="seconds per sample")
    return {
        "chart": line_chart("Seconds per sample over tokens per sample, measured and fitted", lines, x, y),
        "model": model,
        "is_sum": model is not None and model.form is model.additive,
        "terms": {"a": "", "linear": " · ΣS", "quadratic": " · ΣS²", "per_sample": " · B"},
        "error": None if model is None else min(model.additive_error, model.power_law_error),
        "planner_error": found.planner_error,
        "kinds": len(kinds),
    }


def memory(found: Findings) -> Section | None:
    """Memory over steps."""
    records = found.memory
    if not records:
        return None
    lines = [
        Line(name, style, [(record["step"], record[field]) for record in records])
        for name, style, field in (("reserved", "muted", "reserved_gib"), ("peak allocated", "own", "peak_gib"))
    ]
    everything = [value for line in lines for _, value in line.points]
    headrooms = [record["headroom_tokens"] for record in records if "headroom_tokens" in record]
    return {
        "chart": line_chart(
            "GiB of the fullest GPU over optimizer steps",
            lines,
            _steps(lines[0].points),
            Scale.over(everything, unit=" GiB", from_zero=True, title="memory of the fullest GPU"),
        ),
        "peak": max(record["peak_gib"] for record in records),
        "capacity": found.memory_gib,
        "fragmentation": max(record["fragmentation"] for record in records),
        "headroom": min(headrooms) if headrooms else None,
    }


def recalibration(found: Findings) -> Section | None:
    """What the recalibrator changed, and why it left the rest."""
    records = found.run.of("budget")
    if not records:
        return None
    kept = [record for record in records if not record["adopted"]]
    return {
        "names": [name for name in ("m_mem", "m_comp", "target_sync", "p") if any(name in row for row in records)],
        "rows": [record for record in records if record["adopted"]],
        "kept": len(kept),
        "last": kept[-1]["reason"] if kept else None,
    }


def bottlenecks(found: Findings) -> Section | None:
    """What held the run up, window by window: names with their number of windows, and the last finding."""
    records = found.run.of("bottleneck")
    if not records:
        return None
    names = [record["name"] for record in records]
    counts = sorted({name: names.count(name) for name in names}.items(), key=lambda item: -item[1])
    latest = {record["name"]: record for record in records}
    return {"rows": [(name, count, latest[name]) for name, count in counts]}


def injection(found: Findings) -> list[Section]:
    """What the fused kernels replaced and skipped, alike blocks together."""
    return [
        {
            "model": report["model"],
            "kernels": report.get("kernels", ""),
            "replaced": _grouped(report["replaced"]),
            "skipped": _grouped(report["skipped"]),
        }
        for report in found.run.of("injection")[-1:]
    ]


def setup(found: Findings) -> list[tuple[str, Section]]:
    """What the run was: titles, and values by name."""
    start = found.start
    groups = [("Exchange", start["exchange"]), ("Trainer", start["settings"])]
    if graphs := graph_figures(found.run):
        groups.append(("CUDA graphs", graphs))
    if (schedules := found.run.last("schedules")) is not None:
        groups.insert(1, ("Schedules", schedules["chosen"]))
    if found.plans:
        plan = found.plans[-1]
        limits = {name: value for name, value in plan["budget"].items() if name != "step_time"}
        budget = {name: None if value is None else number(value) for name, value in limits.items()}
        weighting = f"{plan['loss_weighting']} over the {plan['loss_normalization']}"
        figures = {"balance": plan["balance"], "micro-batches per step": plan["micro_batches"]}
        figures |= {"loss weighting": weighting, **budget, "seed": plan["seed"]}
        groups.append(("Plan at the end", figures))
    return [*groups, ("Machine", start["machine"]), ("Versions", start["versions"])]


def missing(found: Findings) -> list[tuple[str, str]]:
    """Sections that are left out, and what would fill them."""
    fillers = {
        "memory": ("Memory", "MemoryMonitor"),
        "bottleneck": ("Bottlenecks", "BottleneckAnalyzer"),
        "budget": ("Recalibration", "BudgetRecalibrator"),
        "injection": ("Fused kernels", "FusedKernels"),
    }
    lines = []
    for kind, (section, callback) in fillers.items():
        if found.run.of(kind):
            continue
        there = callback in found.start["callbacks"]
        lines.append((section, f"{callback} ran and recorded nothing." if there else f"Add the callback {callback}."))
    if not found.plans:
        lines.append(("Balances and budgets on the same clips", "Train with VideoDataModule."))
        lines.append(("Loading and samples that are left out", "Train with VideoDataModule."))
    return lines


def _steps(points: Any) -> Scale:
    last = max(step for step, _ in points)
    return Scale(0, last if last > 0 else 1, title="optimizer steps")


def _medians(drawn: list[tuple[str, str, str, list[float]]]) -> str:
    return "; ".join(
        f"{name}, {how}: {percent(float(np.median(values)))} in the median" for name, how, _, values in drawn
    )


def _samples_around(lengths: NDArray[np.float64], kinds: Sequence[ShapeTimes]) -> NDArray[np.float64]:
    """The geometric mean of the batch sizes around every length, smooth over lengths."""
    tokens, samples, counts = (
        np.array([getattr(kind, name) for kind in kinds], np.float64) for name in ("tokens", "samples", "micro_batches")
    )
    nearness = counts * np.exp(-(np.log(lengths[:, None] / tokens) ** 2) / _WIDTH**2)
    mean: NDArray[np.float64] = np.exp(nearness @ np.log(samples) / nearness.sum(axis=1))
    return mean


def _grouped(rows: list[list[str]]) -> list[tuple[str, int, str, str]]:
    """Class, how many, which, and what was done or why not."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, class_name, text in rows:
        groups.setdefault((class_name, text), []).append(path)
    return [
        (class_name, len(paths), " … ".join(dict.fromkeys((paths[0], paths[-1]))), text)
        for (class_name, text), paths in groups.items()
    ]


def tiles(found: Findings) -> list[tuple[str, str, str]]:
    """The figures on top: name, value and what it means."""
    shown = []
    tokens, samples = found.total("tokens"), found.total("samples")
    if tokens is not None and samples is not None and found.seconds:
        rate = f"{number(samples / found.seconds)} samples/s, {number(tokens)} tokens in all"
        shown.append(("Tokens per second", number(tokens / found.seconds), rate))
    if found.data_parallel_ranks > 1 and found.windows:
        spread = found.per_step("cv_step")
        shown.append(
            (
                "CV_step",
                percent(float(np.median(spread))),
                "(max - min) / max of the ranks' work, median step; at 0 % all work equally long",
            )
        )
        paid = found.device_seconds
        lost = f"{duration(paid * found.idle)} of {duration(paid)} of device time"
        shown.append(("Waiting for the slowest", percent(found.idle), lost))
    if found.windows:
        shown.append(("Waiting for data", percent(found.share_of("data")), "of the steps of all ranks"))
    peaks = [record["peak_gib"] for record in found.memory]
    if peaks:
        capacity = found.memory_gib
        shown.append(("Peak memory", f"{max(peaks):.1f} GiB", f"of {capacity} GiB" if capacity else "fullest device"))
    return shown
