"""Videos and captions are encoded once per sequence-parallel group, and to what they are without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_videoscale import BucketBudget, SequenceParallelDDPStrategy, VideoDataModule
from lightning_videoscale.data import Batch, ShapePolicy
from lightning_videoscale.parallel import SplitPlan
from tests.data.clips import write_shard
from tests.data.films import film, numbered
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
FILMS = 12


class Collector(pl.LightningModule):
    """Keeps what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.received: list[Batch] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.received.append(batch)
        return self.net(batch["latents"].mean().view(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Averages(nn.Module):
    """Stands in for a VAE and a text encoder."""

    def forward(self, batch: Batch) -> Batch:
        latents = batch["video"][:, :, ::4, ::8, ::8].float()
        return batch | {"latents": latents, "text_embeds": torch.tensor([[float(text)] for text in batch["caption"]])}


class Counting:
    """Counts the batches that are encoded here, and draws as an encoder that samples does."""

    def __init__(self, folder: str | None) -> None:
        self.encode: Any = Averages()
        if folder is not None:
            from tests.data.encoders import load_encoder

            self.encode = load_encoder(Path(folder))
        self.count = 0

    def to(self, device: torch.device) -> None:
        self.encode.to(device)

    def __call__(self, batch: Batch) -> Batch:
        self.count += 1
        encoded: Batch = self.encode(batch)
        return encoded | {"drawn": torch.rand(2)}


def fit(shard: str, pipeline: str | None, sp: int | None) -> tuple[list[Batch], int]:
    encoder, module = Counting(pipeline), Collector()
    policy = ShapePolicy(areas=(32 * 48,), fps=25.0, max_frames=9, crop_min_frames=1)
    data = VideoDataModule(shard, budget=BucketBudget(40, 1e9), shape_policy=policy, micro_batches=2, encode=encoder)
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    ours = SequenceParallelDDPStrategy(ulysses_size=sp or 1, modules=["net"], plan=plan)
    trainer = pl.Trainer(
        strategy=ours if sp else DDPStrategy(),
        accelerator="cpu",
        devices=dist.get_world_size(),
        accumulate_grad_batches=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return module.received, encoder.count


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("kind", ["module", pytest.param("diffusers and transformers", marks=pytest.mark.full)])
def test_once_per_group_and_as_without_one(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    pipeline = None
    if kind != "module":
        pytest.importorskip("diffusers")
        pytest.importorskip("transformers")
        from tests.data.encoders import save_pipeline

        pipeline = str(save_pipeline(tmp_path / "pipeline"))
    films = [film([numbered(i + k, *((32, 48), (48, 32))[i % 2]) for k in range(9)]) for i in range(FILMS)]
    samples: list[Any] = [{"__key__": f"film{i}", "mp4": data, "txt": str(i).encode()} for i, data in enumerate(films)]
    shard = str(write_shard(tmp_path / "000.tar", samples))
    (ours, first), (theirs, second) = ranks(2).run(fit, shard, pipeline, 2)
    assert first + second == len(ours) == len(theirs) and abs(first - second) <= 1, "in turn"
    for batch, twin in zip(ours, theirs, strict=True):
        assert batch["sample_ids"] == twin["sample_ids"] and batch["meta"] == twin["meta"]
        for name in ("latents", "text_embeds", "drawn"):
            assert torch.equal(batch[name], twin[name])
    assert len({tuple(batch["drawn"].tolist()) for batch in ours}) == len(ours)

    # Two data-parallel ranks encode what they train on, each by itself, under our strategy and under plain DDP.
    alone = {name: row for batch in ours for name, row in rows(batch).items()}
    for sp in (1, None):
        results = ranks(2).run(fit, shard, pipeline, sp)
        assert all(count == len(received) for received, count in results)
        found = {name: row for received, _ in results for batch in received for name, row in rows(batch).items()}
        assert found.keys() == alone.keys() and len(found) == FILMS
        assert all(torch.allclose(found[name], alone[name], atol=1e-5) for name in found)


def rows(batch: Batch) -> dict[str, Tensor]:
    """What each sample was encoded to."""
    parts = (batch["latents"].flatten(1), batch["text_embeds"].flatten(1))
    return dict(zip(batch["sample_ids"], torch.cat(parts, dim=1), strict=True))
