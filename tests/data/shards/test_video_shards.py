"""Shards of videos behind the DataModule, and what happens to it when they break."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, VideoDataModule
from lightning_videoscale.data.planning.shapes import Media, ShapePolicy
from lightning_videoscale.data.shards.indexing import index_shards
from tests.data.clips import write_shard
from tests.data.command_line import FRAMES, Recipe, painted
from tests.data.films import film, numbered, numbers
from tests.data.servers import serving
from tests.data.training import Witness, trainer_with

POLICY = ShapePolicy(areas=(32 * 48,), fps=25.0, max_frames=9, crop_min_frames=1)


def _shards(folder: Path, shards: int = 2, films: int = 4) -> str:
    """Films of 9 frames that begin with their own number, in landscape and in portrait."""
    for shard in range(shards):
        samples = []
        for i in range(shard * films, (shard + 1) * films):
            size = (32, 48) if i % 2 else (48, 32)
            data = film([numbered(i + k, *size) for k in range(9)])
            samples.append({"__key__": f"film{i:02}", "mp4": data, "txt": str(i).encode()})
        write_shard(folder / f"{shard:03}.tar", samples)
    return f"{folder}/{{000..{shards - 1:03}}}.tar"


def _batches(shards: str, index: Path, num_workers: int = 0) -> Any:
    data = VideoDataModule(
        shards, index, budget=BucketBudget(40, 1e9, 2.0), shape_policy=POLICY, num_workers=num_workers, shard_window=1
    )
    data.prepare_data()
    data.setup("fit")
    return iter(data.train_dataloader())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_films_are_read_by_however_many_workers(tmp_path: Path, num_workers: int) -> None:
    batches = list(_batches(_shards(tmp_path), tmp_path / "index", num_workers))
    assert sorted(name[-6:] for batch in batches for name in batch["sample_ids"]) == [f"film{i:02}" for i in range(8)]
    for batch in batches:
        meta = batch["meta"]
        assert batch["video"].shape == (meta.samples, 3, meta.frames, meta.height, meta.width)
        assert batch["video"].dtype == torch.uint8
        for caption, video in zip(batch["caption"], batch["video"], strict=True):
            assert numbers(video) == [int(caption) + k for k in range(9)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_deleted_in_the_middle_of_an_epoch_costs_its_weight(tmp_path: Path, num_workers: int) -> None:
    planned = [batch["meta"] for batch in _batches(_shards(tmp_path, shards=4), tmp_path / "index")]
    batches = _batches(f"{tmp_path}/{{000..003}}.tar", tmp_path / "index", num_workers)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        seen = [next(batches)]
        gone = {path.name for path in tmp_path.glob("*.tar")} - {seen[0]["sample_ids"][0][:7]}
        for name in gone:
            (tmp_path / name).unlink()
        seen += list(batches)
    assert len(seen) == len(planned), "a step is never lost"
    lost = 0.0
    for batch, meta in zip(seen, planned, strict=True):
        assert batch["meta"][:3] == meta[:3] and torch.isfinite(batch["video"].float()).all()
        lost += meta.loss_weight - batch["meta"].loss_weight
    assert lost > 0 and any(batch["meta"].loss_weight == 0 for batch in seen)


def test_videos_and_images_of_all_containers_are_samples(tmp_path: Path) -> None:
    codecs = {"ts": "mpeg2video", "mpg": "mpeg2video", "flv": "flv", "ogv": "libtheora -q:v 10", "webp": "libwebp_anim"}
    samples: list[dict[str, Any]] = [{"__key__": "gif", "gif": Recipe("gif", "gif", pix_fmt="rgb8").make(tmp_path)}]
    samples += [{"__key__": suffix, suffix: Recipe(suffix, codec).make(tmp_path)} for suffix, codec in codecs.items()]
    for suffix in ("avif", "tiff"):
        Image.fromarray(painted(7)).save(tmp_path / f"image.{suffix}")
        samples.append({"__key__": suffix, suffix: tmp_path / f"image.{suffix}"})
    read = [{name: v.read_bytes() if isinstance(v, Path) else v for name, v in sample.items()} for sample in samples]
    index = index_shards([str(write_shard(tmp_path / "000.tar", read))])
    assert not index.refused
    assert {sample.key: (sample.media, sample.num_frames) for sample in index.samples} == {
        **dict.fromkeys(("gif", *codecs), (Media.VIDEO, FRAMES)),
        **dict.fromkeys(("avif", "tiff"), (Media.IMAGE, 1)),
    }


def test_a_server_that_fails_now_and_then_costs_nothing(tmp_path: Path) -> None:
    _shards(tmp_path)
    with serving({path.name: path.read_bytes() for path in tmp_path.glob("*.tar")}) as server:
        batches = _batches(f"{server.url}/{{000..001}}.tar", tmp_path / "index")
        seen = [next(batches)]
        server.failures = 1
        seen += list(batches)
        assert server.failures < 1, "it did fail"
    assert sorted(name[-6:] for batch in seen for name in batch["sample_ids"]) == [f"film{i:02}" for i in range(8)]
    assert all(batch["meta"].loss_weight > 0 for batch in seen)


class Shapes(Witness):
    """Remembers the shapes of its batches, by epoch; trains on pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, list[tuple[int, ...]]] = {}

    def loss(self, batch: Batch) -> torch.Tensor:
        return ((self.slope * batch["video"].double().mean(dim=(1, 2, 3, 4)) / 255 - 1) ** 2).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.shapes.setdefault(self.current_epoch, []).append(tuple(batch["video"].shape))
        return super().training_step(batch, batch_idx)


class SaveAt(Callback):
    """Saves a checkpoint in the middle of an epoch."""

    def __init__(self, epoch: int, batch: int, file: Path) -> None:
        self.place, self.file = (epoch, batch), file

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.place:
            trainer.save_checkpoint(self.file)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_every_epoch_draws_shapes_anew_and_a_resumed_one_the_same(tmp_path: Path) -> None:
    shards = _shards(tmp_path / "shards")
    policy = ShapePolicy((16 * 32, 32 * 48), fps=25.0, max_frames=9, crop_min_frames=1, crop_share=0.5, image_share=0.3)

    def fit(checkpoint: Path | None = None, *callbacks: Callback) -> Shapes:
        module, budget = Shapes(), BucketBudget(40, 1e9, 2.0)
        data = VideoDataModule(shards, budget=budget, shape_policy=policy, micro_batches=2)
        trainer = trainer_with(max_epochs=4, accumulate_grad_batches=2, callbacks=list(callbacks))
        trainer.fit(module, data, ckpt_path=checkpoint)
        assert trainer.global_step * 2 == trainer.fit_loop.epoch_loop.total_batch_idx + 1
        return module

    whole = fit(None, SaveAt(1, 1, tmp_path / "within.ckpt"))
    for batches in whole.batches.values():
        assert {name for ids in batches for name in ids} == {f"00{i // 4}.tar/film{i:02}" for i in range(8)}
    assert len({tuple(sorted(shapes)) for shapes in whole.shapes.values()}) == 4
    resumed = fit(tmp_path / "within.ckpt")
    assert resumed.shapes == {1: whole.shapes[1][2:], 2: whole.shapes[2], 3: whole.shapes[3]}
    assert resumed.batches[1] == whole.batches[1][2:] and resumed.batches[3] == whole.batches[3]
