"""Shards of videos and captions, trained on as latents and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, BatchMeta, OnlineEncoder, VideoDataModule, benchmark_shapes
from lightning_videoscale.data.planning.shapes import ShapePolicy
from tests.data.clips import npy, write_shard
from tests.data.films import film, numbered
from tests.data.training import Witness, trainer_with

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.data.encoders import MAX_LENGTH, load_encoder, save_pipeline

POLICY = ShapePolicy(areas=(32 * 48,), fps=25.0, max_frames=9, crop_min_frames=1)
CAPTIONS = ["1 2 3", "", "4 5 6 7 8 9 10 11", "12"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight films of 9 frames in two shapes, with captions and masks."""
    samples = []
    for i in range(8):
        data = film([numbered(i + k, *((32, 48), (48, 32))[i % 2]) for k in range(9)])
        members = {"mp4": data, "txt": CAPTIONS[i % 4].encode(), "mask.npy": npy(np.full(3, i, "u1"))}
        samples.append({"__key__": f"film{i}", **members})
    return str(write_shard(tmp_path_factory.mktemp("films") / "000.tar", samples))


def _data(shard: str, **kwargs: Any) -> VideoDataModule:
    return VideoDataModule(shard, budget=BucketBudget(72, 1e9), shape_policy=POLICY, **kwargs)


class Collector(Witness):
    def __init__(self) -> None:
        super().__init__()
        self.received: list[Batch] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.received.append(batch)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch["latents"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_model_is_trained_on_what_was_encoded(shard: str, pipeline: Path, num_workers: int) -> None:
    module, encoder = Collector(), load_encoder(pipeline)
    data = _data(shard, encode=encoder, num_workers=num_workers)
    trainer_with().fit(module, data)
    as_read = _data(shard)
    as_read.prepare_data()
    as_read.setup("fit")
    for batch, raw in zip(module.received, as_read.train_dataloader(), strict=True):
        assert batch["sample_ids"] == raw["sample_ids"] and batch["caption"] == raw["caption"]
        assert (batch["mask"] == raw["mask"]).all() and "video" not in batch
        assert batch["latents"].requires_grad is False and not batch["latents"].is_inference()
        _, height, width = raw["meta"][:3]
        assert batch["latents"].shape == (4, 4, 3, height // 8, width // 8)
        assert batch["meta"] == raw["meta"]._replace(frames=3, height=height // 8, width=width // 8)
        alone = torch.stack([encoder._vae.encode(video) for video in raw["video"]])  # type: ignore[union-attr]
        assert torch.allclose(batch["latents"], alone, atol=1e-5)


def test_captions_are_encoded_as_wan_is_trained(pipeline: Path) -> None:
    meta = BatchMeta(3, 4, 6, 18, 4, 1.0, 1.0)
    batch: Batch = {
        "sample_ids": list("abcd"),
        "meta": meta,
        "caption": CAPTIONS,
        "latents": torch.zeros(4, 4, 3, 4, 6),
    }
    encoder = load_encoder(pipeline)
    encoded = encoder(batch)
    assert list(encoded) == [*batch, "text_embeds", "text_mask"] and encoded["latents"] is batch["latents"]
    text: Any = encoder._text
    for caption, embeds, mask in zip(CAPTIONS, encoded["text_embeds"], encoded["text_mask"], strict=True):
        words = [int(word) + 2 for word in caption.split()][:MAX_LENGTH]
        assert mask.tolist() == [True] * len(words) + [False] * (MAX_LENGTH - len(words))
        if words:
            with torch.no_grad():
                alone = text._model(torch.tensor([words])).last_hidden_state[0]
            assert torch.allclose(embeds[: len(words)], alone, atol=1e-5)
        assert not embeds[len(words) :].any()
    embedded = encoded | {"text_embeds": torch.ones(1)}
    assert encoder(embedded)["text_embeds"] is embedded["text_embeds"], "what a shard holds is not encoded again"


def test_validation_and_prediction_are_encoded_too(shard: str, pipeline: Path) -> None:
    data = _data(shard, val_shards=shard, predict_shards=shard, encode=load_encoder(pipeline))
    module, trainer = Collector(), trainer_with()
    trainer.fit(module, data)
    assert sorted(name for ids in module.validated[-1] for name in ids) == [f"000.tar/film{i}" for i in range(8)]
    predicted: Any = trainer.predict(module, data)
    assert sum(len(latents) for latents in predicted) == 8 and {latents.shape[1] for latents in predicted} == {4}


def test_any_module_from_batches_to_batches_will_do(shard: str) -> None:
    class Means(nn.Module):
        def forward(self, batch: Batch) -> Batch:
            return batch | {"latents": batch["video"][:, :, ::4, ::8, ::8].float()}

    module = Collector()
    trainer_with().fit(module, _data(shard, encode=Means()))
    assert all(batch["latents"].shape[1:3] == (3, 3) and "video" in batch for batch in module.received)


def test_a_vae_of_another_model_is_refused(pipeline: Path) -> None:
    with pytest.raises(ValueError, match=r"\(4, 8\).*\(8, 32\)"):
        VideoDataModule("000.tar", geometry="ltx-video", encode=OnlineEncoder(load_encoder(pipeline)._vae))


def test_a_function_is_no_encoder() -> None:
    with pytest.raises(TypeError, match=r"encode=<function .* to\(device\).* nn\.Module"):
        VideoDataModule("000.tar", encode=lambda batch: batch)


def test_shapes_are_measured_on_what_was_encoded(shard: str, pipeline: Path) -> None:
    module = Collector()
    matrix = benchmark_shapes(
        trainer_with(), module, _data(shard, encode=load_encoder(pipeline)), seconds=1e-9, progress=False
    )
    # The rows are of the clips' pixels; 3 latent frames of 4 x 6 cells make 18 tokens.
    assert {row.outcome for row in matrix.rows} == {"measured"}
    assert {(row.frames, row.height * row.width, row.sequence_length) for row in matrix.rows} == {(9, 32 * 48, 18)}
    for batch in module.received:
        meta = batch["meta"]
        assert "video" not in batch and batch["mask"].shape == (meta.samples, 3)
        assert (
            batch["latents"].shape == (meta.samples, 4, 3, meta.height, meta.width) and meta.height * meta.width == 24
        )
        assert batch["text_embeds"].shape == (meta.samples, MAX_LENGTH, 8)


def test_an_encoder_without_memory_is_a_result_of_the_benchmark(shard: str) -> None:
    class Small:
        def to(self, device: torch.device) -> None:
            pass

        def __call__(self, batch: Batch) -> Batch:
            if batch["meta"].samples > 1:
                raise torch.OutOfMemoryError("Tried to allocate 1.00 TiB")
            return {**batch, "latents": batch["video"].float()}

    data = _data(shard, encode=Small())
    matrix = benchmark_shapes(trainer_with(), Collector(), data, seconds=1e-9, progress=False)
    assert [(row.samples > 1, row.outcome) for row in matrix.rows] == [(False, "measured"), (True, "out_of_memory")]
