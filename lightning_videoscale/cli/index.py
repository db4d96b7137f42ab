"""`videoscale index`: what is in some shards, kept as a table that training and planning read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lightning_videoscale.data.index import ShardIndex, default_index_file
from lightning_videoscale.data.indexing import build_index
from lightning_videoscale.data.shapes import Media
from lightning_videoscale.data.shards import ShardError, expand_shards

_SHOWN = 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``index`` to the command line."""
    description = (
        "Decodes every sample of the shards once and keeps a table of their true shapes. Running it again looks only "
        "at shards that changed; a run that was stopped goes on. Exit status 1 if nothing can be used."
    )
    parser = commands.add_parser("index", help="what is in some shards", description=description)
    parser.add_argument("shards", nargs="+", help="tars: paths or URLs, with {000..099} and * as in WebDataset")
    parser.add_argument("--index", type=Path, help="where to keep the table (default: beside the first shard)")
    parser.add_argument("--workers", type=_positive, default=_cores(), help="threads (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        shards = expand_shards(options.shards)
        file = options.index or default_index_file(shards)
        index = build_index(shards, file, options.workers, progress=True)
    except (ShardError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    report = _report(index, file)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    return int(not len(index))


def _report(index: ShardIndex, file: Path) -> dict[str, Any]:
    clips = index.samples.clips
    refused = ({"shard": shard, "member": member, "reason": reason} for shard, (member, reason) in index.refused)
    return {
        "index": str(file),
        "shards": len(index.shards),
        "indexed": len(index),
        "media": {kind.name.lower(): int(np.sum(clips.media == kind)) for kind in Media},
        "hours": round(float(clips.duration.sum()) / 3600, 4),
        "refused": list(refused),
        "ignored": sorted({extension for shard in index.shards for extension in shard.ignored}),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    media = ", ".join(f"{count} {kind}" for kind, count in report["media"].items() if count)
    console.print(f"{report['indexed']} samples ({media or 'none'}) in {report['shards']} shards -> {report['index']}")
    if report["ignored"]:
        console.print(f"not read: {', '.join(report['ignored'])}", markup=False)
    if report["refused"]:
        console.print(f"{len(report['refused'])} refused:")
    for row in report["refused"][:_SHOWN]:
        name = f"{row['shard']}: {row['member']!r}" if row["member"] else row["shard"]
        console.print(f"  {name}: {row['reason']}", markup=False)
    if len(report["refused"]) > _SHOWN:
        console.print("  … (--json lists all)")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
