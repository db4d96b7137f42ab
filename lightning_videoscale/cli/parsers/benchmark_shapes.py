"""What `videoscale benchmark-shapes` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = (
    "Runs the module of a LightningCLI config under its Trainer, forward and backward, on batches of the shapes in "
    "its data, and writes time and memory of each as a matrix. Nothing is trained. budget='auto' finds the matrix "
    "beside the index; `videoscale plan --cost` reads it too. A call that is ended keeps what it has measured in "
    "MATRIX.part, and the next one goes on from there. Under torchrun, or with several devices, the processes "
    "measure together."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    parser.add_argument("--config", type=Path, required=True, help="what `fit --config` takes")
    parser.add_argument("--model", help="package.Class, where the config names no class_path of the model")
    parser.add_argument("--data", help="package.Class, likewise (default: VideoDataModule)")
    parser.add_argument("--output", type=Path, help="the matrix (default: where budget='auto' looks for it)")
    parser.add_argument("--max-shapes", type=int, default=12, help="sequence lengths (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="B * S (default: those of two of the longest samples)")
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape, about (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", help="after --: settings of the config, as --trainer.devices 2")
