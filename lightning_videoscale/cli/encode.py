"""`videoscale encode`: shards of videos and images to shards of latents and embeddings, on any number of ranks.

On several: first `videoscale index`, then `torchrun --nproc-per-node 8 --no-python videoscale encode …`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import torch
from rich.console import Console

from lightning_videoscale.cli.arguments import positive
from lightning_videoscale.cli.folders import add_shards, find_shards
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.encoding.encode_shards import EncodeReport, EncodeSettings, check_encoders, encode_shards
from lightning_videoscale.data.encoding.text import TransformersText
from lightning_videoscale.data.encoding.vae import DiffusersVae
from lightning_videoscale.data.packing.on_the_way import already_packed
from lightning_videoscale.data.planning.shapes import ShapePolicy
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards, outdated

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``encode`` to the command line."""
    description = (
        "Encodes videos and images with a VAE of diffusers, and captions with a text encoder; where shards hold "
        "latents already, the captions alone. Under `torchrun --no-python` every process takes its share; a run that "
        "was stopped goes on, on any number of processes. Exit status 1 if settings are wrong."
    )
    parser = commands.add_parser("encode", help="videos to latents, captions to embeddings", description=description)
    add_shards(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of the new shards")
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
    parser.add_argument("--model", choices=sorted(GEOMETRIES), default="wan2.1", help="which model it is for")
    parser.add_argument("--sizes", type=_area, nargs="+", default=[480 * 832], help="HEIGHTxWIDTH, an area each")
    parser.add_argument("--fps", type=float, default=16.0, help="frames per second (default 16)")
    parser.add_argument("--max-frames", type=int, default=81, help="frames of a clip at most (default 81)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sizes and of the part of a longer clip")
    parser.add_argument("--samples-per-shard", type=int, default=128, help="samples of a new shard (default 128)")
    parser.add_argument("--index", type=Path, help="the table of the shards (default: beside the first)")
    parser.add_argument("--workers", type=int, default=2, help="processes per rank that decode ahead (default 2)")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32", help="type to encode in")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank instead of text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # As torchrun sets them; one process is a world of its own.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        index = _index(options, world_size)
        policy = ShapePolicy(areas=tuple(options.sizes), fps=options.fps, max_frames=options.max_frames,
                             crop_min_frames=min(17, options.max_frames))  # fmt: skip
        check_encoders(index, options.vae is not None, options.text_encoder is not None)
        vae = None
        if options.vae is not None:
            geometry, dtype = GEOMETRIES[options.model], _DTYPES[options.dtype]
            vae = DiffusersVae(options.vae, geometry, options.subfolder, _device(), dtype)
        text = None
        if options.text_encoder is not None:
            text = TransformersText(options.text_encoder, options.max_length)
            text.to(_device())
        report = encode_shards(
            index,
            vae,
            options.output,
            EncodeSettings(policy, options.seed, options.samples_per_shard),
            text=text,
            rank=rank,
            world_size=world_size,
            workers=options.workers,
            progress=rank == 0 and not options.json,
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    _print(report, options, rank)
    return 0


def _index(options: argparse.Namespace, world_size: int) -> ShardIndex:
    if world_size == 1:
        found = find_shards(options)
        file = options.index or found.index_file
        index = build_index(found.shards, file, workers=max(1, options.workers), progress=not options.json)
    else:
        # Ranks do not wait for each other, so each would pack and decode everything to index it.
        found = already_packed([options.shards], options.captions)
        file = options.index or found.index_file
        known = known_shards(file)
        if missing := outdated(found.shards, known):
            raise ShardError(
                f"{len(missing)} of the shards are not in the index {file}, or have changed since: run `videoscale "
                "index` on them first, then encode on several ranks."
            )
        index = index_shards(found.shards, known)
    index.check()
    return index


def _print(report: EncodeReport, options: argparse.Namespace, rank: int) -> None:
    if options.json:
        refused = [refusal._asdict() for refusal in report.refused]
        sys.stdout.write(json.dumps({"rank": rank, **report._asdict(), "refused": refused}) + "\n")
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"rank {rank}: {report.written} shards written, {report.found} were there -> {options.output}")
    for sample, reason in report.refused:
        console.print(f"  left out {sample}: {reason}", markup=False)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _area(text: str) -> int:
    if not (size := re.fullmatch(r"(\d+)x(\d+)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, such as 480x832")
    return int(size[1]) * int(size[2])
