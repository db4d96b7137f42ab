"""`videoscale plan --layout`: how long a layer takes under every division of ranks into ulysses × ring."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_videoscale.parallel.layout import Layout, LayoutChoice, choose_layout, read_machine


def print_layouts(options: argparse.Namespace, lengths: Mapping[int, int] | None) -> None:
    """Prints the table and the choice, or one JSON object.

    Args:
        options: Of the command line.
        lengths: How many clips there are of how many tokens; None where no clips were given.

    Raises:
        ValueError: If no heads are named, or the machine is unknown.
    """
    heads, head_dim = _heads(options)
    lengths = {options.tokens: 1} if options.tokens is not None else lengths
    machine = read_machine(options.machine)
    choice = choose_layout(options.ranks, heads, head_dim, machine, lengths, devices_per_node=options.devices_per_node)
    if options.json:
        sys.stdout.write(json.dumps(_to_dict(choice), indent=2) + "\n")
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"Milliseconds of a transformer block on the slowest rank, forward and backward, at {choice.longest} tokens. "
        "The device and its host work at the same time. Layouts are ulysses x ring."
    )
    columns = ("layout", "heads", "linear", "exchange", "attention", "ring", "device", "host", "speed", "")
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for layout, time in choice.times.items():
        parts = (*time[:4], time.device, time.host)
        table.add_row(
            f"{layout.ulysses} x {layout.ring}",
            str(math.ceil(heads / layout.ulysses)),
            *(f"{1e3 * seconds:.2f}" for seconds in parts),
            f"{choice.speed(layout):.2f}",
            "chosen" if layout == choice.layout else "",
        )
    console.print(table)
    console.print(choice.describe())


def _heads(options: argparse.Namespace) -> tuple[int, int]:
    if options.config is None:
        if options.heads is None:
            raise ValueError("--layout needs the model's heads: give --heads (and --head-dim), or --config.")
        return options.heads, options.head_dim
    try:
        file = options.config / "config.json" if options.config.is_dir() else options.config
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config["num_attention_heads"]), int(config["attention_head_dim"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{options.config} is no config of a diffusers transformer with num_attention_heads and "
            f"attention_head_dim: {error!r}. Give --heads and --head-dim instead."
        ) from error


def _to_dict(choice: LayoutChoice) -> dict[str, object]:
    return {
        "heads": choice.heads,
        "tokens": choice.longest,
        "machine": choice.machine.name,
        "source": choice.machine.source,
        "chosen": _sizes(choice.layout),
        "layouts": [
            {
                **_sizes(layout),
                "projections_ms": 1e3 * time.projections,
                "exchange_ms": 1e3 * time.exchange,
                "attention_ms": 1e3 * time.attention,
                "ring_ms": 1e3 * time.ring,
                "host_ms": 1e3 * time.host,
                "total_ms": 1e3 * time.total,
                "speed": choice.speed(layout),
            }
            for layout, time in choice.times.items()
        ],
    }


def _sizes(layout: Layout) -> dict[str, int]:
    return {"ulysses": layout.ulysses, "ring": layout.ring}
