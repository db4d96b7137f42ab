"""What `videoscale plan` takes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from lightning_videoscale.cli.arguments import at_least, one_of, positive, share

BALANCES = ("planned", "dual_constraint", "equal_token")

LONGEST = 75_600
"""Tokens of the longest clip that Wan is trained on: 81 frames of 720 x 1280."""

DESCRIPTION = (
    "Plans one epoch and prints how evenly it loads the ranks, by predicted cost: of one balance, or of all three "
    "beside each other. The defaults are those of Wan-14B on groups of two GPUs of 80 GB."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    clips = parser.add_mutually_exclusive_group()
    clips.add_argument("--shapes", type=Path, help="CSV with the columns source, width, height, fps, num_frames")
    clips.add_argument("--index", nargs="+", help="what `videoscale index` wrote, or the shards that it was given")
    parser.add_argument("--standard-mix", action="store_true", help="draw sources, tiers, crops and images at random")
    parser.add_argument(
        "--samples",
        type=partial(at_least, 1),
        default=100_000,
        help="samples that the mix draws (default: %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=partial(at_least, 1),
        metavar="CLIPS",
        help="plan so many clips of --index at a time, as VideoDataModule(window=) does; figures are of all windows",
    )
    parser.add_argument("--dp-size", type=int, default=16, help="data-parallel ranks (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="per rank and step (default: %(default)s)")
    parser.add_argument("--balance", choices=BALANCES, help="default: all three")
    parser.add_argument(
        "--m-mem", type=float, default=2 * LONGEST, help="tokens per micro-batch (default: %(default)s)"
    )
    m_comp = parser.add_mutually_exclusive_group()
    m_comp.add_argument("--m-comp", type=float, help="tokens to the power p (default: one clip of 81 frames in 720p)")
    m_comp.add_argument(
        "--best-m-comp",
        action="store_true",
        help="try the default and more, up to twice as much, and plan by the one of most predicted tokens/s",
    )
    parser.add_argument(
        "--min-diversity",
        type=share,
        metavar="SHARE",
        help="different shapes in a step of planned over how many random draws would have, however unequal the ranks "
        "become (default: equal costs go first)",
    )
    parser.add_argument(
        "--cost",
        type=Path,
        help="matrix of `videoscale benchmark-shapes`, or a step-time model (default: FLOPs of --transformer)",
    )
    parser.add_argument(
        "--geometry",
        type=partial(one_of, "GEOMETRIES"),
        metavar="NAME",
        default="wan2.1",
        help="VAE and patches; an unknown name is answered with all (default: %(default)s)",
    )
    parser.add_argument(
        "--transformer",
        type=partial(one_of, "TRANSFORMERS"),
        metavar="NAME",
        default="wan2.1-14b",
        help="likewise (default: %(default)s)",
    )
    parser.add_argument("--seed", type=partial(at_least, 0), default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    _add_layout(parser)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Adds what ``--layout`` takes beside the clips of ``plan``."""
    group = parser.add_argument_group(
        "layout",
        "With --layout, how ranks that share a sequence best divide into ulysses x ring, as strategies choose it where "
        "both sizes are left out. Needs no GPU. Lengths come from --tokens, or from the clips of --index or --shapes.",
    )
    group.add_argument("--layout", action="store_true", help="predict a layer under every layout, and plan nothing")
    group.add_argument("--heads", type=positive, help="attention heads")
    group.add_argument("--head-dim", type=positive, default=128, help="numbers in a head (default: %(default)s)")
    group.add_argument("--config", type=Path, help="config.json of a diffusers transformer, which tells both instead")
    group.add_argument("--tokens", type=positive, help="of a clip (default: those of the clips; without any, 32760)")
    group.add_argument("--ranks", type=positive, default=8, help="that share a sequence (default: %(default)s)")
    group.add_argument("--devices-per-node", type=positive, help="default: all ranks are on one node")
    group.add_argument(
        "--machine",
        default="h200",
        help="h200, h100, default (other GPUs), or a file of benchmarks/parallel/layouts.py (default: %(default)s)",
    )
