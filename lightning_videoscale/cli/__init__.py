"""The command line `videoscale`. One command per file.

`videoscale doctor`   checks versions, GPUs and links, and says what to do about what it finds
`videoscale pack`     packs a folder of videos, images and captions into shards
`videoscale index`    looks at shards, and keeps a table of what is in them and of what cannot be used
`videoscale encode`   turns shards of videos into shards of latents with a VAE of diffusers
`videoscale benchmark-shapes`  measures time and memory of training steps over the shapes of some data
`videoscale plan`     simulates the balances on an index or a table of clips
`videoscale report`   draws the page about a run from what it logged
`videoscale export`   writes the trained weights of a checkpoint for diffusers' ``from_pretrained``, or its adapters
"""

from __future__ import annotations

import argparse

from lightning_videoscale.cli import benchmark_shapes, doctor, encode, export, index, pack, plan, report


def main(args: list[str] | None = None) -> int:
    """Runs one command and returns the process's exit status; ``videoscale --help`` lists the commands."""
    options = build_parser().parse_args(args)
    status: int = options.run(options)
    return status


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="videoscale", description="Tools around lightning-videoscale.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_command(commands)
    pack.add_command(commands)
    index.add_command(commands)
    encode.add_command(commands)
    benchmark_shapes.add_command(commands)
    plan.add_command(commands)
    report.add_command(commands)
    export.add_command(commands)
    return parser
