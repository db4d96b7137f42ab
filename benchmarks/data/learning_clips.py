"""The clips of `learning.py`: cut from the demo's footage on one machine, carried in few megabytes to another."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from patch_codec import PatchCodec

LENGTHS = (1, 5, 9, 13, 21)  # frames of the clips
HELD_OUT = 24  # last frames of every video, which only validation clips are cut from
MORE_FOOTAGE = "bikes.mp4"  # beside the demo's videos in the same wheel
COARSENESS = 8  # latents are multiples of 1/8
GRID = 32  # pixels that sides are multiples of


class CoarseCodec(PatchCodec):
    """The patch codec with latents rounded to an eighth of their deviation, which compress eightfold."""

    def encode(self, pixels: Tensor) -> Tensor:
        return (super().encode(pixels) * COARSENESS).round() / COARSENESS


def prepare(folder: Path, clips: int, side: int) -> None:
    """Cuts clips of every length and two sizes out of every video, and stills out of the photographs.

    Args:
        folder: Gets ``train`` and ``val`` with compressed tars.
        clips: To train on, at least. Those to validate on are ten of every video.
        side: Typical side in pixels.
    """
    from prepare_videos import plan_cuts, write_shards  # needs PyAV, which a machine that only trains may lack
    from video_files import carried_files, probe

    paths = carried_files()
    footage = [probe(path) for path in [paths[0].with_name(MORE_FOOTAGE), *paths]]
    videos = [source for source in footage if not source.is_photo]
    seen = [source if source.is_photo else replace(source, frames=source.frames - HELD_OUT) for source in footage]
    settings = {"clips": clips, "side": side}
    lengths = list(LENGTHS)
    cuts = plan_cuts(seen, clips, lengths, side, None, GRID)
    held_out = [cut for video in videos for cut in plan_cuts([video], 10, lengths, side, video.frames - HELD_OUT, GRID)]
    for name, wanted, shards in (("train", cuts, 8), ("val", held_out, 1)):
        write_shards(folder / name, wanted, CoarseCodec(), shards, settings)
        for tar in (folder / name).glob("*.tar"):
            tar.with_suffix(".tar.xz").write_bytes(lzma.compress(tar.read_bytes()))
            tar.unlink()


def unpack(folder: Path, into: Path, copies: int) -> tuple[str, str]:
    """Makes shards of what `prepare` has written.

    Args:
        folder: What `prepare` has written.
        into: An empty folder.
        copies: How often every sample to train on is there, as links to one file.

    Returns:
        The patterns of the shards to train and to validate on.
    """
    for name, times in (("train", copies), ("val", 1)):
        (into / name).mkdir()
        for packed in sorted((folder / name).glob("*.tar.xz")):
            first = into / name / f"000-{packed.stem}"
            with lzma.open(packed) as source, first.open("wb") as target:
                shutil.copyfileobj(source, target)
            for number in range(1, times):
                os.link(first, into / name / f"{number:03}-{packed.stem}")
    return str(into / "train" / "*.tar"), str(into / "val" / "*.tar")


def describe(folder: Path) -> dict[str, Any]:
    """What names the clips, wherever they lie: a hash, and their bytes."""
    contents = [file.read_bytes() for file in sorted(folder.glob("*/*.tar.xz"))]
    return {"sha256": hashlib.sha256(b"".join(contents)).hexdigest(), "bytes": sum(map(len, contents))}
