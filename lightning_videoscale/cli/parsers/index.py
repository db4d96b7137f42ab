"""What `videoscale index` takes."""

from __future__ import annotations

import argparse

from lightning_videoscale.cli.arguments import add_shards, cores, local_folder, positive

DESCRIPTION = (
    "Decodes every sample of the shards once and keeps a table of their true shapes. Running it again looks only "
    "at shards that changed, and at what could not be reached; a run that was stopped goes on. A folder of videos "
    "and images is packed into shards first, into FOLDER.packed. Exit status 1 if nothing can be used, or "
    "something could not be reached."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    add_shards(parser)
    parser.add_argument("--index", type=local_folder, help="where to keep the table (default: beside the first shard)")
    parser.add_argument("--workers", type=positive, default=cores(), help="threads (default: one per core)")
    parser.add_argument("--caption-key", help="field of .json that holds the captions (default: .txt, or the usual)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
