"""What `videoscale doctor` takes."""

from __future__ import annotations

import argparse

DESCRIPTION = "Checks versions, GPUs and links, and says what to do about it. Exit status 1 if something is bad."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    parser.add_argument(
        "--model",
        metavar="PACKAGE.MODULE:NAME",
        help="look at a model instead: what would be split, exchanged and fused, and why not; a class or function "
        "that makes it, or a folder with a config.json of diffusers",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
