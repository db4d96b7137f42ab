"""What the user is told about the samples of a plan."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, VideoDataModule
from lightning_videoscale.data.loading.data_warnings import oversized_shapes, say_uneven
from lightning_videoscale.data.planning import BucketPlanner
from tests.data.clips import clip, write_shard
from tests.data.films import film, numbered
from tests.data.planning.tables import table_of
from tests.data.training import Witness, trainer_with
from tests.models import tiny_wan


def test_shapes_whose_samples_count_more_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # One rank: a step of 20 samples of 4 tokens, or one of 80, each with a gradient of its own.
    planner = BucketPlanner(table_of([0] * 40 + [3] * 2), BucketBudget(80, 1e9), "dual_constraint")
    shapes = planner.table.shapes
    say_uneven(planner.plan(0))
    (said,) = [record.message for record in caplog.records]
    assert f"{shapes[3][:3]} counts 10 times" in said and f"{shapes[0][:3]} 0.53 times" in said  # 42 / 4, and a 20th
    assert "loss_normalization='epoch'" in said


def test_a_shape_that_is_too_large_with_what_it_takes_beside_its_tokens_is_named_with_that() -> None:
    table = table_of([0, 3])  # of 4 and 80 tokens
    said = oversized_shapes(table, BucketBudget(100, 1e9, overhead_tokens=30.5))
    assert "m_mem=100" in said and "30.5" in said and ": 80 tokens" in said and ": 4 tokens" not in said
    assert ": 80 tokens" not in oversized_shapes(table, BucketBudget(100, 1e9))


def test_nothing_is_said_where_samples_count_alike(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    planner = BucketPlanner(table_of([0] * 40 + [3] * 2), BucketBudget(80, 1e9), loss_normalization="epoch")
    say_uneven(planner.plan(0))
    say_uneven(planner.plan(0, done=np.ones(42, bool)))  # nothing is left of the epoch
    assert not caplog.records


class OfModel(Witness):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)


def tiny_ltx() -> nn.Module:
    return LTXVideoTransformer3DModel(
        in_channels=2, out_channels=2, num_attention_heads=2, attention_head_dim=4, num_layers=1, caption_channels=4,
        cross_attention_dim=8,
    )  # fmt: skip


def test_the_geometry_of_another_model_is_named(tmp_path: Path) -> None:
    """LTX-Video makes four times the tokens that the default counts, Wan 2.1's."""
    shards = write_shard(tmp_path / "000.tar", [clip(i) for i in range(3)])

    def fit(network: nn.Module, geometry: str) -> None:
        data = VideoDataModule(str(shards), budget=BucketBudget(64, 64**2), geometry=geometry)
        trainer_with(limit_train_batches=1).fit(OfModel(network), data)

    named = r"geometry='wan2.1', and LTXVideoTransformer3DModel .* \['ltx-2', 'ltx-video'\]"
    with pytest.warns(UserWarning, match=named):
        fit(tiny_ltx(), "wan2.1")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "VideoDataModule counts tokens")
        fit(tiny_ltx(), "ltx-video")
        fit(tiny_wan(), "skyreels-v2")


class Embedded(Witness):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.slope * batch["text_embeds"].sum()


def test_a_member_that_the_shards_do_not_hold_is_explained(tmp_path: Path) -> None:
    videos = [{"__key__": f"{i}", "mp4": film([numbered(i + k, 32, 48) for k in range(2)])} for i in range(2)]
    cases = {"latents": (videos, Witness()), "text_embeds": ([clip(i) for i in range(3)], Embedded())}
    for name, (samples, module) in cases.items():
        data = VideoDataModule(str(write_shard(tmp_path / f"{name}.tar", samples)), budget=BucketBudget(64, 64**2))
        with pytest.raises(KeyError, match=f"'{name}'") as caught:
            trainer_with().fit(module, data)
        (note,) = caught.value.__notes__
        assert "videoscale encode" in note and "VideoDataModule(encode=OnlineEncoder(" in note
