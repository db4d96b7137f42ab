"""Shards, or folders of videos and images that are packed on the way, as `videoscale index` and `encode` take them."""

from __future__ import annotations

import argparse

from rich.console import Console

from lightning_videoscale.cli.arguments import cores
from lightning_videoscale.data.packing.on_the_way import Found, pack_on_the_way


def find_shards(options: argparse.Namespace) -> Found:
    """Finds the shards, and packs folders; raises as `pack_on_the_way` does."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    return pack_on_the_way(
        [options.shards], options.captions, say=lambda line: console.print(line, markup=False), workers=cores()
    )
