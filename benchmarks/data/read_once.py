"""CPU time that decoding one micro-batch costs, by the size of the sequence-parallel group that trains on it.

    python benchmarks/data/read_once.py

Short trainings over gloo on this machine, one group of all ranks: as the strategies read (each micro-batch once per
group), and as it would be without (every rank for itself). Clips are decoded from a video file, as a user's own dataset
does it. CPU time of the decoding thread is counted, which other processes on the machine hardly change.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import av
import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, task_of_worker
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

SIZES = (1, 2, 4)
SETTINGS = {"micro_batches": 24, "clips": 1, "frames": 32, "height": 240, "width": 416, "codec": "mpeg4"}


class Clips(Dataset[Tensor]):
    """One file under many indices; notes the CPU seconds of every decoding here."""

    def __init__(self, file: str, count: int) -> None:
        self.file = file
        self.count = count
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = time.thread_time()
        with av.open(self.file) as video:
            video.streams.video[0].codec_context.thread_count = 1
            clip = torch.from_numpy(np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]))
        self.seconds.append(time.thread_time() - start)
        return clip


class Idle(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch.flatten()[:1].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class EveryRankReads(SequenceParallelDDPStrategy):
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader


def train(file: str, once: bool) -> list[list[float]]:
    """Returns the CPU seconds of the decodings, by rank."""
    strategy = (SequenceParallelDDPStrategy if once else EveryRankReads)(
        modules=["net"], plan=SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    )
    clips = Clips(file, SETTINGS["micro_batches"])
    pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Idle(), DataLoader(clips, batch_size=SETTINGS["clips"]))
    by_rank: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, clips.seconds)
    return by_rank


def encode(file: Path) -> None:
    """Writes a clip of moving bands and noise, which compresses about as well as footage."""
    generator = np.random.default_rng(0)
    height, width = SETTINGS["height"], SETTINGS["width"]
    bands = np.sin(np.arange(height)[:, None, None] / 9 + np.arange(width)[None, :, None] / 14 + np.arange(3))
    with av.open(str(file), "w") as video:
        stream = video.add_stream(SETTINGS["codec"], rate=16)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for t in range(SETTINGS["frames"]):
            frame = 128 + 90 * np.roll(bands, 5 * t, axis=1) + generator.normal(0, 8, bands.shape)
            pixels = frame.clip(0, 255).astype(np.uint8)
            video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())


def row(size: int, once: bool, by_rank: list[list[float]]) -> dict[str, Any]:
    if once:
        per_micro_batch = [s for turns in zip_longest(*by_rank) for s in turns if s is not None]
    else:
        per_micro_batch = [sum(reads) for reads in zip(*by_rank, strict=True)]
    milliseconds = 1e3 * np.array(per_micro_batch)
    return {
        "sequence_parallel_size": size,
        "variant": "once per group" if once else "every rank",
        "reads_per_micro_batch": sum(map(len, by_rank)) / SETTINGS["micro_batches"],
        "reads_by_rank": [len(reads) for reads in by_rank],
        "median_cpu_ms": round(float(np.median(milliseconds)), 1),
        "p10_cpu_ms": round(float(np.quantile(milliseconds, 0.1)), 1),
        "p90_cpu_ms": round(float(np.quantile(milliseconds, 0.9)), 1),
    }


def main() -> None:
    commit = provenance.commit()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        encode(file)
        for size in SIZES:
            for once in (True, False) if size > 1 else (True,):
                rows.append(row(size, once, launch(__file__, ranks=size, file=str(file), once=once)))
                print(rows[-1])
    provenance.write(provenance.path("data", "read_once"), "data/read_once", commit, SETTINGS, rows)


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        finish(train(**task))
    else:
        main()
