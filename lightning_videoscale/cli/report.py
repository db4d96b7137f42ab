"""`videoscale report`: the page about a run, from what it logged, after whatever end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lightning_videoscale.report import LOG_NAME, REPORT_NAME, write_report


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``report`` to the command line."""
    description = (
        f"Draws {REPORT_NAME} from the {LOG_NAME} that the callback RunReport keeps: after a crash or a kill, while "
        "the run goes on, or again. Exit status 1 if there is no log."
    )
    parser = commands.add_parser("report", help="draw the report of a run", description=description)
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help=f"the folder with {LOG_NAME}")
    parser.add_argument(
        "--output", type=Path, help=f"the file or folder to write to (default: {REPORT_NAME} beside the log)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        path = write_report(options.folder, options.output)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    sys.stdout.write(f"{path}\n")
    return 0
