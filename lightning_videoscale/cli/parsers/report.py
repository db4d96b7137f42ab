"""What `videoscale report` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = (
    "Draws report.html from the run_log.jsonl that the callback RunReport keeps: after a crash or a kill, while "
    "the run goes on, or again. Exit status 1 if there is no log."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="the folder with run_log.jsonl")
    parser.add_argument(
        "--output", type=Path, help="the file or folder to write to (default: report.html beside the log)"
    )
