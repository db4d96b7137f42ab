"""The figures of what the ranks of a sequence share, for `benchmarks/figures.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

GIB = 2**30
_SCHEDULES = {"serial": "tab:gray", "overlap": "tab:blue", "sliced": "tab:red"}
_LINES = {"collective": ":", "symmetric": "-"}
_VARIED = ("mode", "model", "strategy", "layout", "transport", "schedule")

Result = dict[str, Any]


def loss_overlay(result: Result) -> None:
    """Left the curves, right how far each is from that of one GPU in bfloat16."""
    _, (curves, differences) = plt.subplots(1, 2, figsize=(10, 3.6))
    styles = ["-", ":", "--", "-.", (0, (1, 3))]
    reference = np.array(result["rows"][0]["losses"])
    for row, style in zip(result["rows"], styles, strict=True):
        gpus = row["ring_size"] * row["ulysses_size"]
        label = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        if row["ring_size"] > 1:
            label += f" (ring {row['ring_size']} x ulysses {row['ulysses_size']})"
        if row["precision"] != "bf16-mixed":
            label += ", float32"
        losses = np.array(row["losses"])
        curves.plot(losses, linestyle=style, label=label)
        if row is not result["rows"][0]:
            differences.semilogy(np.abs(losses - reference) / reference, linewidth=0.8, label=label)
    curves.set(xlabel="step", ylabel="loss", title="Training loss, bf16-mixed")
    differences.set(xlabel="step", ylabel="relative", title="Difference from 1 GPU in bf16-mixed")
    curves.legend(fontsize=8)
    differences.legend(fontsize=8)


def activation_memory(result: Result) -> None:
    """Activations by length, without and with checkpointing; points are measured, lines fitted."""
    _, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    points = [row for row in result["rows"] if "fit" not in row]
    lines = [row for row in result["rows"] if "fit" in row]
    for panel, checkpointing in zip(panels, (False, True), strict=True):
        for line in (line for line in lines if line["activation_checkpointing"] is checkpointing):
            setting = ("ranks", "activation_checkpointing", "transport")
            mine = [point for point in points if all(point[name] == line[name] for name in setting)]
            longest = line["longest_tokens"] or max(p["tokens"] for p in mine)
            x = np.array([0, longest])
            y = (line["before_bytes"] + line["constant_bytes"] + line["bytes_per_token"] * x) / GIB
            transport = ", symmetric" if line["transport"] == "symmetric" else ""
            label = f"{line['ranks']} GPU{'s' if line['ranks'] > 1 else ''}{transport}: {longest / 1e3:.0f}k tokens"
            (drawn,) = panel.plot(x / 1e3, y, linewidth=1, label=label)
            measured = [p for p in mine if p["tokens"] <= longest]
            panel.plot(
                [p["tokens"] / 1e3 for p in measured],
                [p["peak_bytes"] / GIB for p in measured],
                "o",
                markersize=4,
                color=drawn.get_color(),
            )
        panel.axhline(result["settings"]["cap_gib"], color="gray", linestyle=":", linewidth=1)
        title = "with" if checkpointing else "without"
        panel.set(xlabel="thousand tokens", ylabel="peak GiB per GPU", title=f"Wan-1.3B {title} checkpointing")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8)


def attention_layer(result: Result) -> None:
    """Time of every variant over that of ours (collective) on the same mesh."""
    rows = [row for row in result["rows"] if "median_ms" in row]
    meshes = sorted({(row["ring_size"], row["ulysses_size"]) for row in rows})
    _, panels = plt.subplots(1, len(meshes), figsize=(5 * len(meshes), 3.8), sharey=True, squeeze=False)
    for panel, mesh in zip(panels[0], meshes, strict=True):
        here = [row for row in rows if (row["ring_size"], row["ulysses_size"]) == mesh]
        shapes = list(dict.fromkeys((row["model"], row["tokens_per_rank"]) for row in here))
        names = list(dict.fromkeys(row["variant"] for row in here))
        times = {(row["model"], row["tokens_per_rank"], row["variant"]): row["median_ms"] for row in here}
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            heights = [times.get((*shape, name), np.nan) / times[(*shape, names[0])] for shape in shapes]
            panel.bar(np.arange(len(shapes)) + (number - (len(names) - 1) / 2) * width, heights, width, label=name)
        panel.axhline(1, color="gray", linewidth=0.8)
        labels = [f"{model}\n{tokens // 1024}k" if tokens >= 1024 else f"{model}\n{tokens}" for model, tokens in shapes]
        panel.set_xticks(range(len(shapes)), labels, fontsize=7)
        panel.set_title(f"ring {mesh[0]} x ulysses {mesh[1]}")
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    panels[0][0].set_ylabel("time over ours, collective")


def attention_backends(result: Result) -> None:
    """Time of torch's own pick over that of what was chosen, by length and heads; bars are the spread of the rounds."""
    rows = [row for row in result["rows"] if "heads" in row]
    _, axes = plt.subplots(figsize=(7, 3.8))
    for number, heads in enumerate(sorted({row["heads"] for row in rows})):
        here = sorted((row for row in rows if row["heads"] == heads), key=lambda row: row["tokens"])
        ratios = [row["sdpa_over_auto"] for row in here]
        middle = np.array([ratio["median"] for ratio in ratios])
        spread = [middle - [ratio["min"] for ratio in ratios], [ratio["max"] for ratio in ratios] - middle]
        x = np.array([row["tokens"] for row in here]) * 1.03 ** (number - 2)
        axes.errorbar(x, middle, spread, marker="o", markersize=4, linewidth=1, capsize=2, label=f"{heads} heads")
    axes.axhline(1, color="gray", linewidth=0.8)
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{tokens / 1000:.1f}k" for tokens in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="torch's own pick over auto", title="Attention, forward and backward")
    axes.legend(fontsize=8, ncols=2)


def strong_scaling(result: Result) -> None:
    """Left a step of a clip that all GPUs share, right the throughput of a GPU beside one with a clip of its own.

    On one GPU, right the throughput beside eager steps.
    """
    _, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    shared = [row for row in result["rows"] if row.get("sp", 1) > 1]
    rows = shared or result["rows"]
    right = "per_gpu_over_whole_clips" if shared else "eager_over_this"
    varied = [name for name in _VARIED if len({row.get(name) for row in rows}) > 1]
    for setting in dict.fromkeys(tuple(row.get(name) for name in varied) for row in rows):
        mine = [row for row in rows if tuple(row.get(name) for name in varied) == setting]
        here = sorted(mine, key=lambda row: row["tokens"])
        tokens = [row["tokens"] for row in here]
        for panel, name in zip(panels, ("step_ms", right), strict=True):
            panel.plot(tokens, [row[name] for row in here], "o-", label=", ".join(map(str, setting)))
    lengths = sorted({row["tokens"] for row in rows})
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xticks(lengths, [f"{tokens / 1000:.1f}k" for tokens in lengths])
        panel.minorticks_off()
        panel.set_xlabel("tokens of the clip")
        panel.set_ylim(bottom=0)
    panels[0].set(ylabel="ms", title="A step, one clip on all GPUs" if shared else "A step")
    beside = "a GPU with a clip of its own" if shared else "eager steps"
    panels[1].set(ylabel=f"over {beside}", title="Tokens per second of a GPU")
    panels[1].axhline(1, color="gray", linewidth=0.8)
    panels[0].legend(fontsize=8)


def schedules(result: Result) -> None:
    """Time over that of the same work without an exchange, by tokens of a rank: projections, and whole layers."""
    _, panels = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    rows = [row for row in result["rows"] if row["batch_size"] == 1 and "over_alone" in row]
    titles = {("projections", "forward"): "projections, forward", ("projections", "backward"): "projections, backward"}
    for panel, ((part, direction), title) in zip(panels, titles.items(), strict=False):
        here = [row for row in rows if (row["part"], row["direction"]) == (part, direction)]
        _by_schedule(panel, {(_schedule(row), row["s_local"]): row["over_alone"] for row in here})
        panel.set(title=title, xlabel="tokens of a rank")
    total: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["part"] == "layer":
            place = _schedule(row), row["s_local"]
            total[place] = total.get(place, 0.0) + row["median_ms"]
    whole = {tokens for name, tokens in total if name == "alone"}
    _by_schedule(panels[2], {(name, s): ms / total["alone", s] for (name, s), ms in total.items() if s in whole})
    panels[2].set(title="layer, forward and backward", xlabel="tokens of a rank")
    panels[0].set_ylabel("time over that without exchange")
    panels[2].legend(fontsize=7)


def _schedule(row: dict[str, Any]) -> str:
    return ", ".join(filter(None, (row["schedule"], row["transport"])))


def _by_schedule(panel: Any, ratios: dict[tuple[str, int], float]) -> None:
    for (schedule, color), (transport, line) in itertools.product(_SCHEDULES.items(), _LINES.items()):
        name = f"{schedule}, {transport}"
        points = sorted((tokens, ratio) for (each, tokens), ratio in ratios.items() if each == name)
        panel.plot(*zip(*points, strict=True), line, color=color, marker="o", markersize=4, linewidth=1, label=name)
    panel.axhline(1, color="gray", linewidth=0.8)
    panel.set_xscale("log", base=2)
    tokens = sorted({tokens for _, tokens in ratios})
    panel.set_xticks(tokens, [f"{each // 1024}k" for each in tokens])


PARALLEL: dict[str, Callable[[Result], None]] = {
    "parallel/loss_overlay": loss_overlay,
    "parallel/activation_memory": activation_memory,
    "parallel/attention_layer": attention_layer,
    "parallel/attention_backends": attention_backends,
    "parallel/schedules": schedules,
    "parallel/schedules_by_graphs": schedules,
    "parallel/strong_scaling": strong_scaling,
}
