"""The command line `videoscale`. One command per file, and what it takes in `parsers`, which imports nothing heavy.

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
import os
import sys
from importlib import import_module
from importlib.metadata import version

COMMANDS = {
    "doctor": "check this machine",
    "pack": "a folder of videos to shards",
    "index": "what is in some shards",
    "encode": "videos to latents, captions to embeddings",
    "benchmark-shapes": "time and memory of training steps",
    "plan": "simulate the balances on an index or a table",
    "report": "draw the report of a run",
    "export": "weights of a checkpoint for diffusers",
}

_INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell shows it: 128 + SIGINT."""


def main(args: list[str] | None = None) -> int:
    """Runs one command and returns the process's exit status; ``videoscale --help`` lists the commands."""
    given = sys.argv[1:] if args is None else args
    options = build_parser(given).parse_args(given)
    command: str = options.command
    try:
        status: int = import_module(f"{__name__}.{_file(command)}").run(options)
        sys.stdout.flush()
    except argparse.ArgumentError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        sys.stderr.write(f"\nvideoscale {command}: interrupted. Run it again to go on.\n")
        return _INTERRUPTED
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich made it of one
            return 0
        raise
    return status


def build_parser(args: list[str]) -> argparse.ArgumentParser:
    """Returns the parser of all commands, with the arguments of the one that the command line calls."""
    parser = argparse.ArgumentParser(prog="videoscale", description="Tools around lightning-videoscale.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-videoscale')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, short in COMMANDS.items():
        command = commands.add_parser(name, help=short)
        if name in args:
            takes = import_module(f"{__name__}.parsers.{_file(name)}")
            command.description = takes.DESCRIPTION
            command.set_defaults(parser=command)
            takes.add_arguments(command)
    return parser


def _file(command: str) -> str:
    return command.replace("-", "_")
