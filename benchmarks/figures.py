"""Draws the figures of the documentation from the files in benchmarks/results.

    pip install matplotlib
    python benchmarks/figures.py

Written to docs/figures/ is what a page of docs/ shows. With --output, every figure whose result file exists is written
under this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.parallel.figures import PARALLEL

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
GIB = 2**30

Result = dict[str, Any]


def plan(result: Result) -> None:
    """Left how unequal the ranks' predicted costs are, right how much of their time they do not wait."""
    _, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    rows = [row for row in result["rows"] if row["dp_size"] == 16]
    steps = sorted({row["micro_batches"] for row in rows})
    for balance in dict.fromkeys(row["balance"] for row in rows):
        for panel, name in zip(panels, ("cost_cv", "efficiency"), strict=True):
            by_step = [[r[name] for r in rows if (r["balance"], r["micro_batches"]) == (balance, k)] for k in steps]
            panel.plot(steps, [np.median(values) for values in by_step], "o-", label=balance)
    panels[0].set(xlabel="micro-batches a step", ylabel="std / mean of the ranks", title="Predicted cost, 16 ranks")
    panels[0].set_yscale("log")
    panels[1].set(xlabel="micro-batches a step", ylabel="mean / max", title="Time that ranks do not wait")
    panels[0].legend(fontsize=8)


def balances(result: Result) -> None:
    """Left tokens per second below the ceiling of each run, right how many steps have at most which CV_step."""
    _, (speeds, spreads) = plt.subplots(1, 2, figsize=(10, 3.6))
    colors = {"equal_token": "C2", "dual_constraint": "C1", "planned": "C0"}
    order = list(colors)  # bars are drawn from below
    rows = [row for row in result["rows"] if row.get("m_comp_of") != "common"]
    rows.sort(key=lambda row: (-row["micro_batches"], -row.get("draw", 0), order.index(row["balance"])))
    for place, row in enumerate(rows):
        color, k = colors[row["balance"]], row["micro_batches"]
        label = f"{row['balance']}, K = {k}" + (f", draw {row['draw']}" if "draw" in row else "")
        speed, ceiling = row["tokens_per_second"] / 1e3, row["ceiling_tokens_per_second"] / 1e3
        speeds.barh(label, ceiling, color=color, alpha=0.25)
        speeds.barh(label, speed, color=color)
        speeds.text(speed, place, f"{row['share_of_ceiling']:.1%} ", va="center", ha="right", color="white", fontsize=8)
        compute = np.array(row["compute_seconds"])
        cv_step = np.sort(1 - compute.min(axis=1) / compute.max(axis=1))
        share = np.arange(1, len(cv_step) + 1) / len(cv_step)
        spreads.step(cv_step, share, where="post", color=color, linestyle="-" if k == 1 else "--", label=label)
    speeds.set(xlabel="thousand tokens per second; pale: the ceiling", title="Throughput, share of the ceiling")
    spreads.set(xlabel="CV_step of compute time", ylabel="share of the steps with at most that", title="CV_step")
    spreads.legend(fontsize=7)


def learning(result: Result) -> None:
    """The validation loss, left over samples and right over seconds; pale bands: from the best to the worst seed."""
    _, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    runs: dict[str, list[Any]] = {}
    for row in result["rows"]:
        others = ("" if row["fused"] else ", kernels off") + (f", sp = {row['sp']}" if row["sp"] > 1 else "")
        runs.setdefault(row["balance"] + others, []).append(row)
    for panel, over in zip(panels, ("samples", "seconds"), strict=True):
        for name, rows in runs.items():
            x = np.linspace(0, min(row[over][-1] for row in rows), 200)
            losses = np.array([np.interp(x, row[over], row["losses"]) for row in rows])
            (line,) = panel.plot(x, losses.mean(axis=0), linewidth=1, label=name)
            panel.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.25)
        panel.set(xlabel=over, yscale="log")
    panels[0].set(ylabel="validation loss", title="Samples that were trained on")
    panels[1].set(title="Seconds of training")
    panels[0].legend(fontsize=8)


def step_time_fit(result: Result) -> None:
    """Left seconds by tokens, measured and predicted, right the errors; filled: held out of the fit."""
    _, (seconds, errors) = plt.subplots(1, 2, figsize=(10, 3.8))
    rows = [row for row in result["rows"] if row["seconds"] is not None]
    lengths = sorted({row["sequence_length"] for row in rows})
    for length, color in zip(lengths, plt.colormaps["viridis"](np.linspace(0, 0.95, len(lengths))), strict=True):
        mine = [row for row in rows if row["sequence_length"] == length]
        tokens = [row["samples"] * length for row in mine]
        fill = color if mine[0]["held_out"] else "none"
        marks = {"marker": "o", "edgecolors": [color], "facecolors": [fill], "s": 28}
        seconds.plot(tokens, [row["predicted_seconds"] for row in mine], color=color, linewidth=1)
        seconds.scatter(tokens, [row["seconds"] for row in mine], label=f"S = {length}", **marks)
        errors.scatter([row["seconds"] for row in mine], [100 * row["error"] for row in mine], **marks)
    seconds.set(xscale="log", yscale="log", xlabel="tokens, B·S", ylabel="seconds of a step", title="Lines: predicted")
    errors.axvline(result["settings"]["floor"], color="gray", linestyle=":", linewidth=1)
    errors.axhline(0, color="gray", linewidth=0.5)
    errors.set(xscale="log", xlabel="seconds of a step; dotted: the host's floor", ylabel="error of the prediction, %")
    seconds.legend(fontsize=7)


def row_ops(result: Result) -> None:
    """Per op and direction at the widest D: share of a device copy's bandwidth by number of tokens."""
    rows = [row for row in result["rows"] if "percent_of_copy" in row and row["implementation"] != "copy"]
    widest = max(row["d"] for row in rows)
    rows = [row for row in rows if row["d"] == widest]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    _, panels = plt.subplots(2, len(ops), figsize=(3.6 * len(ops), 5.6), sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colors = dict(zip(names, plt.colormaps["tab10"].colors, strict=False))
    for column, op in enumerate(ops):
        for line, direction in enumerate(("forward", "backward")):
            panel = panels[line][column]
            for name in names:
                mine = [r for r in rows if (r["op"], r["direction"], r["implementation"]) == (op, direction, name)]
                x, y = [row["n"] / 1024 for row in mine], [row["percent_of_copy"] for row in mine]
                panel.semilogx(x, y, "o-", markersize=3, linewidth=1, base=2, color=colors[name], label=name)
            panel.axhline(100, color="gray", linestyle=":", linewidth=1)
            panel.set_title(f"{op}, {direction}", fontsize=8)
    thousands = sorted({row["n"] // 1024 for row in rows})
    for panel in panels[-1]:
        panel.set_xticks(thousands, [str(n) for n in thousands])
        panel.set_xlabel("thousand tokens")
    for line in panels:
        line[0].set_ylabel(f"% of a copy, D = {widest}")
    panels[0][0].set_ylim(0, 108)
    handles, labels = panels[0][0].get_legend_handles_labels()
    panels[0][0].figure.legend(handles, labels, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.0))


def wan_step(result: Result) -> None:
    """Where a step's time goes, and its peak memory, by mode."""
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    _, panels = plt.subplots(
        len(models), 2, figsize=(10, 2.4 * len(models)), squeeze=False, gridspec_kw={"width_ratios": (2, 1)}
    )
    for (times, peaks), model in zip(panels, models, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model][::-1]  # bars are drawn from below
        modes = [row["mode"] for row in rows]
        left = np.zeros(len(rows))
        parts = {"attention": "attention_ms", "matrix products": "gemm_ms"}
        widths = {label: np.array([row[key] for row in rows]) for label, key in parts.items()}
        widths["everything else"] = np.array([row["median_ms"] for row in rows]) - sum(widths.values())
        for label, width in widths.items():
            times.barh(modes, width, left=left, label=label)
            left += width
        for mode, end in zip(modes, left, strict=True):
            times.text(end, mode, f" {end:.0f}", va="center", fontsize=8)
        times.set(xlim=(0, 1.08 * left.max()), title=f"{model}, {rows[0]['tokens']} tokens: ms")
        peaks.barh(modes, [row["peak_bytes"] / GIB for row in rows], color="tab:gray")
        peaks.set(yticks=[], title="peak GiB")
    handles, labels = panels[0][0].get_legend_handles_labels()
    panels[0][0].figure.legend(handles, labels, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.0))


def kernels_loss_overlay(result: Result) -> None:
    """A line of panels for each model: left the curves, right how far each is from that without kernels in bfloat16."""
    models: dict[str, list[Any]] = {}
    for row in result["rows"]:
        models.setdefault(row["model"], []).append(row)
    _, panels = plt.subplots(len(models), 2, figsize=(10, 3.6 * len(models)), squeeze=False)
    for (name, rows), (curves, differences) in zip(models.items(), panels, strict=True):
        reference = np.array(rows[0]["losses"])
        for row, style in zip(rows, ["-", ":", "--", "-."], strict=True):
            label = f"{'fused' if row['fused'] else 'plain'}, {row['precision']}"
            losses = np.array(row["losses"])
            curves.plot(losses, linestyle=style, label=label)
            if row is not rows[0]:
                differences.semilogy(np.abs(losses - reference) / reference, linewidth=0.8, label=label)
        curves.set(xlabel="step", ylabel="loss", title=f"Training loss of a small {name}")
        differences.set(xlabel="step", ylabel="relative", title="Difference from plain, bf16-mixed")
        curves.legend(fontsize=8)
        differences.legend(fontsize=8)


def recalibration(result: Result) -> None:
    """Samples of the longest length that fit, p and the ranks' spread over the steps, over the oracle's."""
    _, (budgets, exponents, spreads) = plt.subplots(1, 3, figsize=(13, 3.6))
    for row in result["rows"]:
        ranks = row.get("dp_size", result["settings"].get("ranks"))
        replayed = f", measured costs, {row['budget']}" if "budget" in row else ""
        label = f"{ranks} ranks, K = {row.get('micro_batches', 1)}, p {row['p_error']:+.1f}{replayed}"
        dashes = {"target_sync": "--", "m_comp": ":"}.get(row.get("budget"), "-")
        (line,) = budgets.plot(row["steps"], row["room_over_oracle"], dashes, linewidth=1, label=label)
        style = {"linestyle": dashes, "linewidth": 1, "color": line.get_color()}
        exponents.plot(row["steps"], np.array(row["p_by_step"]) - row["p"], **style)
        spreads.plot(row["steps"], np.array(row["cv"]) / row["oracle_cv"], **style)
    budgets.axhspan(0.95, 1.05, color="gray", alpha=0.2)
    measured = "step_seconds" in row
    budgets.set(title="Room for the longest length over the oracle's")
    exponents.set(title="p minus what the oracle began with" if measured else "p minus the true p")
    spreads.axhline(1.3, color="gray", linestyle=":", linewidth=1)
    spreads.set(title="CV of the ranks' costs over the oracle's", ylim=(0, None))
    for panel in (budgets, exponents, spreads):
        panel.set_xlabel("step")
        if row["steps"][-1] > 500:
            panel.set_xscale("log")
    budgets.figure.legend(
        *budgets.get_legend_handles_labels(), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4
    )


def predictions(result: Result) -> None:
    """Nothing measured, hence dashed lines with open marks, and hatched bars: scaling of a step, and balance."""
    _, (*scalings, balance) = plt.subplots(1, 3, figsize=(15, 4), gridspec_kw={"width_ratios": [1, 1, 1.2]})
    steps = [row for row in result["rows"] if row["kind"] == "strong scaling"]
    lengths = sorted({row["tokens"] for row in steps})
    for panel, model in zip(scalings, dict.fromkeys(row["model"] for row in steps), strict=True):
        here = [row for row in steps if row["model"] == model]
        for layout in dict.fromkeys((row["gpus"], row["dp"], row["ulysses"], row["ring"]) for row in here):
            mine = [row for row in here if (row["gpus"], row["dp"], row["ulysses"], row["ring"]) == layout]
            gpus, dp, ulysses, ring = layout
            label = f"{gpus} GPUs: " + (f"dp {dp} x " if dp > 1 else "") + f"ulysses {ulysses}"
            label += f" x ring {ring}" if ring > 1 else ""
            over = [row["per_gpu_over_one"] for row in mine]
            panel.plot(lengths, over, "o--", markerfacecolor="none", linewidth=1, label=label)
        panel.set_xscale("log")
        panel.set_xticks(lengths, [f"{tokens / 1000:.1f}k" for tokens in lengths])
        panel.minorticks_off()
        panel.set(xlabel="tokens of the clip", title=f"Predicted: {model}, CUDA graphs", ylim=(0, 1.05))
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.legend(fontsize=7, loc="lower right")
    scalings[0].set_ylabel("tokens/s of a GPU over one alone")
    rows = [row for row in result["rows"] if row["kind"] == "balance"]
    ranks, counts = (sorted({row[name] for row in rows}) for name in ("ranks", "micro_batches"))
    balances = ("equal_token", "dual_constraint", "planned")
    found = {(row["balance"], row["micro_batches"], row["ranks"]): row["efficiency"] for row in rows}
    for number, name in enumerate(balances):
        for place, count in enumerate(counts):
            heights = [found[name, count, n] for n in ranks]
            x = np.arange(len(ranks)) + (number - 1) * 0.28 + (place - 1) * 0.085
            style = {"edgecolor": f"C{number}", "facecolor": "none", "hatch": ("//", "xx", "....")[place]}
            balance.bar(x, heights, 0.08, label=f"{name}, K = {count}", **style)
    balance.set_xticks(range(len(ranks)), ranks)
    balance.set(xlabel="data-parallel ranks", title="Simulated: mean / max of the ranks", ylim=(0, 1.05))
    balance.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def replayed_balances(result: Result) -> None:
    """Left the replayed throughput of measured steps beside their own, right what whole epochs are replayed to gain."""
    _, (beside, gains) = plt.subplots(1, 2, figsize=(11, 3.8))
    balances = ("equal_token", "dual_constraint", "planned")
    for number, balance in enumerate(balances):
        mine = [row for row in result["rows"] if row["kind"] == "check" and row["balance"] == balance]
        measured, replayed = ([row[of]["tokens_per_second"] / 1e3 for row in mine] for of in ("measured", "replayed"))
        beside.plot(measured, replayed, "o", color=f"C{number}", markerfacecolor="none", label=balance)
    ends = np.array(beside.get_xlim())
    beside.plot(ends, ends, color="gray", linewidth=0.8)
    beside.fill_between(ends, 0.98 * ends, 1.02 * ends, color="gray", alpha=0.2, label="within 2 %")
    beside.set(xlabel="measured thousand tokens per second", ylabel="replayed", title="The steps that were measured")
    beside.legend(fontsize=7)
    rows = [row for row in result["rows"] if row["kind"] == "replay" and row["m_comp_of"] == "own"]
    longest, m_mem = min(((row["longest"], row["m_mem_over_longest"]) for row in rows), default=(0, 0))
    rows = [row for row in rows if (row["longest"], row["m_mem_over_longest"]) == (longest, m_mem)]
    ranks = sorted({row["ranks"] for row in rows})
    for number, balance in enumerate(balances[1:], 1):
        for k, line in ((1, "--"), (2, "-."), (4, ":")):
            mine = [row for row in rows if (row["balance"], row["micro_batches"]) == (balance, k)]
            if over := [[r["over_equal_token"] for r in mine if r["ranks"] == n] for n in ranks]:
                style = {"color": f"C{number}", "linestyle": line, "marker": "o", "markerfacecolor": "none"}
                gains.plot(ranks, [np.mean(each) for each in over], label=f"{balance}, K = {k}", **style)
    gains.set_xscale("log", base=2)
    gains.set_xticks(ranks, ranks)
    gains.set(xlabel="data-parallel ranks", title=f"Replayed: tokens/s over equal_token, up to {longest} tokens")
    gains.legend(fontsize=7, ncols=2)


FIGURES: dict[str, Callable[[Result], None]] = PARALLEL | {
    "kernels/loss_overlay": kernels_loss_overlay,
    "kernels/row_ops": row_ops,
    "kernels/wan_step": wan_step,
    "predictions/scaling": predictions,
    "predictions/replayed_balances": replayed_balances,
    "data/learning": learning,
    "data/learning_step": learning,
    "data/plan": plan,
    "cost/step_time_fit": step_time_fit,
    "data/balances": balances,
    "callbacks/recalibration": recalibration,
    "callbacks/recalibration_on_gpus": recalibration,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, help="folder; left out, docs")
    arguments = parser.parse_args()
    pages = "" if arguments.output else "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name, draw in FIGURES.items():
        for file in sorted(arguments.results.glob(f"{name}-*.json")):
            picture = f"figures/{file.parent.name}/{file.stem}.png"
            if not arguments.output and picture not in pages:
                continue
            result = json.loads(file.read_text())
            draw(result)
            machine = result["machine"]
            title = f"{machine['gpus']} x {machine['gpu'] or 'CPU'}, torch {machine['torch']}, {result['date']}"
            if result["settings"].get("kind") == "prediction":
                note = result["settings"].get("note", "nothing of this is measured")
                title = f"predicted for {result['settings']['of']}, {note}, {result['date']}"
            plt.suptitle(title, fontsize=8)
            plt.tight_layout()
            target = (arguments.output or DOCS) / picture
            target.parent.mkdir(parents=True, exist_ok=True)
            plt.savefig(target, dpi=150, bbox_inches="tight")
            plt.close()
            print(f"{target} from {file.name}")


if __name__ == "__main__":
    main()
