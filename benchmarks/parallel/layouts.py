"""An attention layer, forward and backward, under every layout of all GPUs, beside what was predicted and chosen.

    torchrun --nproc-per-node 2 benchmarks/parallel/layouts.py
    python benchmarks/parallel/layouts.py --fit-from benchmarks/results/parallel/attention_layer-h200x*.json

A layer is the projections to query, key and value, attention, and the output projection, in bf16, B = 1, D = 128, with
torch's own pick of a kernel and exchanges by NCCL. A cell is a number of heads and a length; its layouts take turns.
The file says of each layout what it takes, what was predicted, and which one `choose_layout` takes for an attention
layer alone. ``over_best`` of the chosen one is what the choice costs.

``--fit`` also fits the constants of the machine to the times, and keeps them as ``machine_constants`` in the file,
which `videoscale plan --layout --machine FILE` reads. ``--fit-from`` does it with files that are there and prints them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import join_ranks
from benchmarks.parallel.attention_layer import Layer, largest
from benchmarks.timing import alternate
from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.parallel import SequenceMesh, sequence_parallel_attention
from lightning_videoscale.parallel.layout import (
    MACHINES,
    Host,
    Layout,
    LayoutChoice,
    Machine,
    choose_layout,
    machine_of,
    predict,
)
from lightning_videoscale.parallel.layout import Layer as PredictedLayer

HEADS = (12, 24, 40)
LENGTHS = (8_192, 16_384, 32_760, 75_600)
DIM = 128
WARM_UP, REPEATS, ROUNDS = 1, 2, 3
Row = dict[str, Any]

DOUBT = {
    "matmul": 0.2, "attention": 0.05, "memory": 0.4, "link": 0.2, "message": 0.5, "contention": 0.7,
    "layer": 0.5, "exchange": 0.5, "step": 0.5,
}  # fmt: skip
"""By how much each constant may differ from the one to begin with, as a logarithm. The last three are the host's."""

PARTS = replace(
    MACHINES["h200"],
    matmul=6e14,
    attention=5.6e14,
    memory=2.5e12,
    link=3e11,
    message=2.5e-5,
    contention=0.04,
    alone=Host(layer=5e-4, exchange=1.2e-4, step=9e-4),
)
"""Where a fit to H100s and H200s begins: what was measured of the parts alone (results of all_to_all and
attention_backends), half of a copy's speed for copies that change the order, and guesses of contention and host."""


def fit(rows: Iterable[Row], begin: Machine = PARTS, name: str = "fitted") -> Machine:
    """Fits the constants of a machine to measured layers.

    It minimises the squares of relative errors, with 3 % for noise, and holds each constant to where it begins by its
    `DOUBT`: some are hardly seen in the layers at hand. What the network and a whole block take is not fitted.

    Args:
        rows: With ``heads``, ``head_dim``, ``tokens`` (or ``tokens_per_rank``), ``ulysses_size``, ``ring_size`` and
            ``median_ms``; others are left out.
        begin: Constants to begin with.
        name: Of the machine.
    """
    cases = [
        (
            PredictedLayer(
                row["heads"],
                row["head_dim"],
                row.get("tokens") or row["tokens_per_rank"] * row["ulysses_size"] * row["ring_size"],
                in_block=False,
            ),
            Layout(row["ulysses_size"], row["ring_size"]),
            row["median_ms"] / 1e3,
        )
        for row in rows
        if "median_ms" in row and row.get("variant", "ours, collective") == "ours, collective"
    ]

    def machine(change: Sequence[float]) -> Machine:
        factors = dict(zip(DOUBT, np.exp(change).tolist(), strict=True))
        host = Host(*(getattr(begin.alone, part) * factors[part] for part in ("layer", "exchange", "step")))
        device = {part: getattr(begin, part) * factors[part] for part in DOUBT if part not in asdict(host)}
        source = f"fitted to {len(cases)} layers"
        return replace(begin, name=name, source=source, alone=host, margin=PARTS.margin, **device)

    def errors(change: Sequence[float]) -> list[float]:
        tried = machine(change)
        wrong = [math.log(predict(layer, layout, tried).total / seconds) / 0.03 for layer, layout, seconds in cases]
        return wrong + [far / doubt for far, doubt in zip(change, DOUBT.values(), strict=True)]

    return machine(least_squares(errors, np.zeros(len(DOUBT)), diff_step=1e-3).x)


def measure(
    heads: int, dim: int, tokens: int, meshes: Mapping[Layout, SequenceMesh], device: torch.device, rounds: int
) -> list[Row]:
    """The cell of one number of heads and one length: a row for each layout, the largest Ulysses group first."""
    layer = Layer(heads, dim, tokens // dist.get_world_size(), device)
    choices = AttentionChoices("sdpa")
    variants, reference, differences = {}, None, {}
    for layout, mesh in meshes.items():
        attention = partial(sequence_parallel_attention, mesh=mesh, attention_backend=choices)
        variants[str(layout)] = partial(layer.step, attention)
        results = layer.step(attention)
        reference = results if reference is None else reference
        differences[layout] = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, reference, strict=True)
        )
    times = alternate(variants, device=device, warm_up=WARM_UP, repeats=REPEATS, rounds=rounds)
    choice = chosen(heads, dim, tokens, device)
    best = min(mine.median for mine in times.values())
    return [
        {
            "heads": heads,
            "head_dim": dim,
            "tokens": tokens,
            "ulysses_size": layout.ulysses,
            "ring_size": layout.ring,
            "median_ms": round(times[str(layout)].median, 4),
            "round_medians_ms": [round(ms, 4) for ms in times[str(layout)].rounds],
            "over_best": round(times[str(layout)].median / best, 4),
            "predicted_ms": round(1e3 * choice.times[layout].total, 4),
            "predicted_parts_ms": {part: round(1e3 * s, 4) for part, s in choice.times[layout]._asdict().items()},
            "chosen": layout == choice.layout,
            "difference_from_first": float(f"{largest(differences[layout], device):.2e}"),
        }
        for layout in meshes
    ]


def chosen(heads: int, dim: int, tokens: int, device: torch.device) -> LayoutChoice:
    """What `choose_layout` takes for the layer."""
    return choose_layout(dist.get_world_size(), heads, dim, speeds(device), {tokens: 1}, in_block=False)


def speeds(device: torch.device) -> Machine:
    return machine_of(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def within(rows: list[Row], share: float = 1.03) -> str:
    """In how many cells the choice is that near to the best."""
    costs = [row["over_best"] for row in rows if row["chosen"]]
    return f"{sum(cost <= share for cost in costs)} of {len(costs)} cells"


def show(rows: list[Row]) -> None:
    for row in rows:
        print(
            f"{row['heads']:>5} {row['tokens']:>7} {row['ulysses_size']:>4} x {row['ring_size']} "
            f"{row['median_ms']:>9.3f} {row['predicted_ms']:>9.3f} {row['over_best']:>9.3f} "
            f"{row['difference_from_first']:>10.1e} {'chosen' if row['chosen'] else ''}",
            flush=True,
        )


def run(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    device = join_ranks(not options.tiny)
    first, world = dist.get_rank() == 0, dist.get_world_size()
    commit = (options.commit or provenance.commit()) if first else ""
    dim, lengths = (16, (64, 96)) if options.tiny else (DIM, options.lengths)
    sizes = [size for size in range(world, 0, -1) if world % size == 0]
    meshes = {
        Layout(size, world // size): SequenceMesh.create(device.type, ulysses_size=size, ring_size=world // size)
        for size in sizes
    }
    rows: list[Row] = []
    if first:
        print("heads  tokens ulysses x ring   ms  predicted  over best  difference")
    for count in options.heads:
        for tokens in lengths:
            cell = measure(count, dim, tokens, {at: mesh for at, mesh in meshes.items() if at.ulysses <= count}, device,
                           options.rounds)  # fmt: skip
            rows += cell
            if first:
                show(cell)
    if first:
        machine = speeds(device)
        settings = {
            "dry_run": options.tiny,
            "ranks": world,
            "batch_size": 1,
            "dtype": "bfloat16",
            "attention_kernel": "torch's own pick",
            "warmup": WARM_UP,
            "repeats": REPEATS,
            "rounds": options.rounds,
            "predicted_with": machine.name,
            "within_3_percent_of_the_best": within(rows),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        if options.fit:
            begin_with = PARTS if machine.name in ("h100", "h200") else machine
            settings["machine_constants"] = asdict(fit(rows, begin_with, f"{machine.name}, fitted"))
        output = options.output or provenance.path("parallel", "layouts")
        provenance.write(output, "parallel/layouts", commit, settings, rows)
        print(f"the choice is within 3 % of the best in {settings['within_3_percent_of_the_best']}; "
              f"{settings['seconds']} s; written to {output}")  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--fit", action="store_true", help="fit the constants of this machine too")
    parser.add_argument("--fit-from", type=Path, nargs="+", help="result files to fit to; nothing is measured")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs with gloo at other, tiny shapes")
    options = parser.parse_args()
    if options.fit_from:
        rows = [row for file in options.fit_from for row in json.loads(file.read_text())["rows"]]
        print(json.dumps(asdict(fit(rows)), indent=1))
    else:
        run(options)


if __name__ == "__main__":
    main()
