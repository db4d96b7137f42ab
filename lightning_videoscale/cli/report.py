"""`videoscale report`: the page about a run, from what it logged, after whatever end."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from lightning_videoscale.report import write_report


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        path = write_report(options.folder, options.output)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    sys.stdout.write(f"{path}\n")
    return 0
