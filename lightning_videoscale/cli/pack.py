"""`videoscale pack`: a folder of videos and images, and their captions, into WebDataset shards."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lightning_videoscale.data.packing.one_at_a_time import one_at_a_time
from lightning_videoscale.data.packing.pack_folder import PackReport, pack_folder
from lightning_videoscale.data.shards.errors import ShardError

_SHOWN = 20


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        # Another command, or a job that packs the folder on the way, may be writing the same shards.
        is_folder = options.folder.is_dir()  # else packing says so, and leaves no lock behind
        with one_at_a_time(options.output.resolve(), is_needed=False) if is_folder else nullcontext():
            report = pack_folder(
                options.folder, options.output, options.captions,
                file_column=options.file_column, caption_column=options.caption_column,
                samples_per_shard=options.samples_per_shard, bytes_per_shard=options.megabytes_per_shard * 2**20,
                workers=options.workers, progress=not options.json,
            )  # fmt: skip
    except (ShardError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    if options.json:
        sys.stdout.write(json.dumps(asdict(report), default=str, indent=2) + "\n")
    else:
        _print(report, options.output)
    return int(not report.samples)


def _print(report: PackReport, output: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{report.samples} samples in {len(report.shards)} shards ({report.written} written now) -> {output}",
        markup=False,
    )
    console.print(report.captioned, markup=False)
    _list(console, "named there, but no file", report.strangers)
    _list(console, "left out", [f"{file}: {reason}" for file, reason in report.left_out])
    if others := [f"{count} .{kind}" for kind, count in report.ignored.items()]:
        console.print(f"of other kinds: {', '.join(others)}", markup=False)
    if report.samples:
        console.print(f"next: videoscale index '{output}/*.tar'", markup=False)


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"{len(lines)} {title}:", markup=False)
    for line in lines[:_SHOWN]:
        console.print(f"  {line}", markup=False)
    if len(lines) > _SHOWN:
        console.print("  … (--json lists all)")
