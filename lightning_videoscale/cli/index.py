"""`videoscale index`: what is in some shards, kept as a table that training and planning read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lightning_videoscale.cli.folders import find_shards
from lightning_videoscale.data.loading.data_warnings import check_caption_key
from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.index_table import IndexTable
from lightning_videoscale.data.shards.indexing import build_index

_SHOWN = 20


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        found = find_shards(options)
        file = options.index or found.index_file
        index = build_index(found.shards, file, options.workers, progress=True, caption_key=options.caption_key)
        check_caption_key(index, options.caption_key)
    except (ShardError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    report = _report(index, IndexTable(file).folder)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    return int(not len(index) or bool(index.unread))


def _report(index: ShardIndex, file: Path) -> dict[str, Any]:
    clips = index.samples.clips
    refused, unread = (
        [{"shard": shard, "member": member, "reason": reason} for shard, (member, reason) in rows]
        for rows in (index.refused, index.unread)
    )
    return {
        "index": str(file),
        "shards": len(index.shards),
        "indexed": len(index),
        "media": {kind.name.lower(): int(np.sum(clips.media == kind)) for kind in Media},
        "hours": round(float(clips.duration.sum()) / 3600, 4),
        "without_caption": sum(index.without_caption),
        "caption_fields": sorted({field for shard in index.shards for field in shard.caption_fields}),
        "refused": refused,
        "unread": unread,
        "ignored": sorted({extension for shard in index.shards for extension in shard.ignored}),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    media = ", ".join(f"{count} {kind}" for kind, count in report["media"].items() if count)
    found = f"{report['indexed']} samples ({media or 'none'}) in {report['shards']} shards"
    console.print(f"{found} -> {report['index']}", markup=False)
    if report["indexed"]:
        fields = f" (found in .json under {', '.join(report['caption_fields'])})" * bool(report["caption_fields"])
        console.print(f"{report['without_caption']} samples have no caption{fields}", markup=False)
    if report["ignored"]:
        console.print(f"not read: {', '.join(report['ignored'])}", markup=False)
    if report["refused"]:
        _print_rows(console, f"{len(report['refused'])} refused:", report["refused"])
    if report["unread"]:
        _print_rows(
            console,
            f"{len(report['unread'])} samples or shards could not be read just now; run this again, which looks at "
            "these alone:",
            report["unread"],
        )


def _print_rows(console: Console, title: str, rows: list[dict[str, str]]) -> None:
    console.print(title)
    reason = ""
    for row in rows[:_SHOWN]:
        name = f"{row['shard']}: {row['member']!r}" if row["member"] else row["shard"]
        console.print(f"  {name}: {'likewise' if row['reason'] == reason else row['reason']}", markup=False)
        reason = row["reason"]
    if len(rows) > _SHOWN:
        console.print("  … (--json lists all)")
