"""What `videoscale export` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_videoscale.cli.arguments import local_folder

DESCRIPTION = (
    "Writes a trained network as an ordinary diffusers folder, for from_pretrained. Of one that was trained with "
    "adapters (LoRA), writes these, for diffusers' load_lora_weights and peft's PeftModel.from_pretrained."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    parser.add_argument("checkpoint", help="a checkpoint, such as checkpoints/last.ckpt or s3://bucket/run/last.ckpt")
    parser.add_argument("output", type=local_folder, help="the folder to write, on a disk")
    parser.add_argument("--module", help="path of the network in the LightningModule, such as transformer")
    parser.add_argument("--merge", action="store_true", help="write the network with its adapters merged into it")
    parser.add_argument(
        "--base", type=Path, help="folder of the network before training, for checkpoints that leave it out"
    )
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="averages of the weights (callback EMA), or the weights in training; by default averages if there are any",
    )
