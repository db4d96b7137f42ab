"""What `videoscale encode` takes."""

from __future__ import annotations

import argparse
from functools import partial

from lightning_videoscale.cli.arguments import add_shards, area, local_folder, one_of, positive

DESCRIPTION = (
    "Encodes videos and images with a VAE of diffusers, and captions with a text encoder; where shards hold "
    "latents already, the captions alone. Under `torchrun --no-python` every process takes its share; a run that "
    "was stopped goes on, on any number of processes. Exit status 1 if settings are wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and options."""
    add_shards(parser)
    parser.add_argument("--output", type=local_folder, required=True, help="folder of the new shards")
    parser.add_argument(
        "--vae",
        help="folder of a saved VAE, or its name on the Hugging Face Hub; leave it out where shards hold latents",
    )
    parser.add_argument("--subfolder", help="folder of the VAE within it, such as vae")
    parser.add_argument(
        "--text-encoder",
        metavar="NAME",
        help="embeddings of the captions beside the latents: folder of a saved pipeline with text_encoder and "
        "tokenizer, or its name on the Hugging Face Hub",
    )
    parser.add_argument("--max-length", type=positive, default=512, help="tokens of a caption (default 512, as Wan)")
    parser.add_argument(
        "--model",
        type=partial(one_of, "GEOMETRIES"),
        metavar="NAME",
        default="wan2.1",
        help="which model it is for; an unknown name is answered with all (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes", type=area, nargs="+", default=[480 * 832], help="HEIGHTxWIDTH, an area each (default 480x832)"
    )
    parser.add_argument("--fps", type=float, default=16.0, help="frames per second (default 16)")
    parser.add_argument("--max-frames", type=int, default=81, help="frames of a clip at most (default 81)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sizes and of the part of a longer clip")
    parser.add_argument("--samples-per-shard", type=int, default=128, help="samples of a new shard (default 128)")
    parser.add_argument("--index", type=local_folder, help="the table of the shards (default: beside the first)")
    parser.add_argument(
        "--caption-key", help="field of .json that holds the captions (default: the one that the table was made with)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes per rank that decode ahead (default 2)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="type to encode in"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank instead of text")
