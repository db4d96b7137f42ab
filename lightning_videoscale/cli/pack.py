"""`videoscale pack`: a folder of videos and images, and their captions, into WebDataset shards."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lightning_videoscale.cli.arguments import cores, positive
from lightning_videoscale.data.packing.pack_folder import PackReport, pack_folder
from lightning_videoscale.data.shards.errors import ShardError

_SHOWN = 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``pack`` to the command line."""
    description = (
        "Packs the videos and images of a folder, and of the folders in it, into WebDataset shards, which all other "
        "commands and VideoDataModule read. A run that was stopped goes on, and a folder that has changed is packed "
        "again only where it has. Captions are in a table, or in a text file beside each video. Files that cannot be "
        "opened are left out and listed. Exit status 1 if nothing was packed."
    )
    parser = commands.add_parser("pack", help="a folder of videos to shards", description=description)
    parser.add_argument("folder", type=Path, help="folder of videos and images, or of Parquet files with them")
    parser.add_argument("output", type=Path, help="folder of the shards; new, or begun by an earlier run")
    parser.add_argument(
        "--captions",
        type=Path,
        metavar="FILE",
        help="table with a row per file: .csv, .tsv, .parquet, .jsonl or .json (default: metadata.csv, .jsonl, .json "
        "or .parquet in the folder, else the .txt beside each file)",
    )
    parser.add_argument("--file-column", metavar="NAME", help="its column that names the file (default: by its name)")
    parser.add_argument("--caption-column", metavar="NAME", help="its column of captions (default: by its name)")
    parser.add_argument("--samples-per-shard", type=positive, default=1000, help="at most (default 1000)")
    parser.add_argument("--megabytes-per-shard", type=positive, default=1024, help="at most (default 1024)")
    parser.add_argument("--workers", type=positive, default=cores(), help="threads (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
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
    console.print(f"captions from {report.captions_from}: {report.without_caption} samples have none", markup=False)
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
