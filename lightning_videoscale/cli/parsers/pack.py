"""What `videoscale pack` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_videoscale.cli.arguments import cores, local_folder, positive

DESCRIPTION = (
    "Packs the videos and images of a folder, and of the folders in it, into WebDataset shards, which all other "
    "commands and VideoDataModule read. A run that was stopped goes on, and a folder that has changed is packed "
    "again only where it has. Captions are in a table, or in a text file beside each video. Files that cannot be "
    "opened are left out and listed. Exit status 1 if nothing was packed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    parser.add_argument("folder", type=Path, help="folder of videos and images, or of Parquet files with them")
    parser.add_argument("output", type=local_folder, help="folder of the shards; new, or begun by an earlier run")
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
