"""`videoscale encode`: shards of videos and images to shards of latents and embeddings, on any number of ranks.

On several: first `videoscale index`, then `torchrun --nproc-per-node 8 --no-python videoscale encode …`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from lightning_videoscale.cli.folders import find_shards
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.encoding.encode_shards import EncodeReport, EncodeSettings, check_encoders, encode_shards
from lightning_videoscale.data.encoding.text import TransformersText
from lightning_videoscale.data.encoding.vae import DiffusersVae
from lightning_videoscale.data.loading.data_warnings import check_caption_key
from lightning_videoscale.data.packing.on_the_way import already_packed
from lightning_videoscale.data.planning.shapes import ShapePolicy
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.index_table import IndexTable
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards, outdated


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    # As torchrun sets them; one process is a world of its own.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        index = _index(options, world_size)
        policy = ShapePolicy(areas=tuple(options.sizes), fps=options.fps, max_frames=options.max_frames,
                             crop_min_frames=min(17, options.max_frames))  # fmt: skip
        check_encoders(index, options.vae is not None, options.text_encoder is not None)
        vae = None
        if options.vae is not None:
            geometry, dtype = GEOMETRIES[options.model], getattr(torch, options.dtype)
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
        key = _caption_key(options, file)
        workers = max(1, options.workers)
        index = build_index(found.shards, file, workers, progress=not options.json, caption_key=key)
    else:
        # Ranks do not wait for each other, so each would pack and decode everything to index it.
        found = already_packed([options.shards], options.captions)
        file = options.index or found.index_file
        key = _caption_key(options, file)
        known = known_shards(file)
        if missing := outdated(found.shards, known, key):
            option = "" if key is None else f" --caption-key '{key}'"
            raise ShardError(
                f"{len(missing)} of the shards are not in the index {file}, have changed since, or are there with "
                f"captions of another field: run `videoscale index`{option} on them first, then encode on several "
                "ranks."
            )
        index = index_shards(found.shards, known, caption_key=key)
    index.check()
    check_caption_key(index, key)
    return index


def _caption_key(options: argparse.Namespace, file: Path) -> str | None:
    """The field of captions that is asked for, or else that of the table that is there, which is said."""
    table = IndexTable(file)
    if options.caption_key is not None or not table.exists:
        return cast("str | None", options.caption_key)
    keys = {shard.caption_key for shard in table.shards()}
    if len(keys) > 1:
        raise ShardError(f"The index {file} holds captions of several fields, {keys}: name one with --caption-key.")
    key = next(iter(keys), None)
    if key is not None and os.environ.get("RANK", "0") == "0":
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"captions are the field {key!r} of .json, as in the index {table.folder}; --caption-key names another, "
            "and `videoscale index` without it brings back the usual ones",
            markup=False,
        )
    return key


def _print(report: EncodeReport, options: argparse.Namespace, rank: int) -> None:
    if options.json:
        refused = [refusal._asdict() for refusal in report.refused]
        sys.stdout.write(json.dumps({"rank": rank, **report._asdict(), "refused": refused}) + "\n")
        return
    console = Console(soft_wrap=True, highlight=False)
    said = f"rank {rank}: {report.written} shards written, {report.found} were there -> {options.output}"
    console.print(said, markup=False)
    for sample, reason in report.refused:
        console.print(f"  left out {sample}: {reason}", markup=False)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
