"""Videos and captions encoded on the GPU that trains, once per sequence-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale import BucketBudget, SequenceParallelDDPStrategy, VideoDataModule
from lightning_videoscale.data import Batch, ShapePolicy
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import write_shard
from tests.data.films import film, numbered
from tests.distributed.loading.test_online_encoding import Collector, Counting
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
pytestmark = pytest.mark.gpu
FILMS = 12


class OnGPU(Collector):
    """What it is trained on lies on its device."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert batch["latents"].device == self.device and batch["text_embeds"].device == self.device
        return super().training_step(batch, batch_idx)


def fit(shard: str, pipeline: str, sp: int) -> tuple[list[Batch], int]:
    encoder, module = Counting(pipeline), OnGPU()
    policy = ShapePolicy(areas=(64 * 96,), fps=25.0, max_frames=9, crop_min_frames=1)
    data = VideoDataModule(shard, budget=BucketBudget(160, 1e9), shape_policy=policy, micro_batches=2, encode=encoder)
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    trainer = pl.Trainer(
        strategy=SequenceParallelDDPStrategy(ulysses_size=sp, modules=["net"], plan=plan),
        accelerator="gpu" if dist.get_backend() == "nccl" else "cpu",
        devices=dist.get_world_size(),
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    on_host = [{k: v.cpu() if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in module.received]
    return on_host, encoder.count


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("world", [1, 2])
def test_once_per_group_and_as_on_the_host(tmp_path: Path, gpu_ranks: Ranks, world: int) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    from tests.data.encoders import load_encoder, save_pipeline

    films = [film([numbered(i + k, *((64, 96), (96, 64))[i % 2]) for k in range(9)]) for i in range(FILMS)]
    samples: list[Any] = [{"__key__": f"film{i}", "mp4": data, "txt": str(i).encode()} for i, data in enumerate(films)]
    shard, pipeline = str(write_shard(tmp_path / "000.tar", samples)), save_pipeline(tmp_path / "pipeline")
    results = gpu_ranks(world).run(fit, shard, str(pipeline), world)
    received = results[0][0]
    assert sum(count for _, count in results) == len(received)
    for batches in zip(*(batches for batches, _ in results), strict=True):
        for name in ("latents", "text_embeds", "text_mask", "drawn"):
            assert all(torch.equal(batch[name], batches[0][name]) for batch in batches)

    as_read = VideoDataModule(
        shard,
        budget=BucketBudget(160, 1e9),
        shape_policy=ShapePolicy(areas=(64 * 96,), fps=25.0, max_frames=9, crop_min_frames=1),
        micro_batches=2,
    )
    as_read.prepare_data()
    as_read.setup("fit")
    encode = load_encoder(pipeline)
    for batch, raw in zip(received, as_read.train_dataloader(), strict=False):
        expected = encode(raw)
        assert batch["sample_ids"] == raw["sample_ids"]
        for name in ("latents", "text_embeds"):
            assert (batch[name] - expected[name]).norm() / expected[name].norm() < 1e-2
