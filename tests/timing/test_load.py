"""What is read of a batch: of `VideoDataModule`'s, and of any with a `meta` like its."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, VideoDataModule
from lightning_videoscale.timing import MicroBatchLoad, load_of
from tests.data.clips import write_shards
from tests.data.training import Witness, trainer_with


def test_batches_of_the_data_module(tmp_path: Path) -> None:
    """The loads are those of the tensors that the module trains on."""

    class Reading(Witness):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            load, (samples, _, *shape) = load_of(batch), batch["latents"].shape
            frames, height, width = shape
            assert load is not None
            assert (load.samples, load.frames, load.height, load.width) == (samples, *shape)
            assert load.sequence_length == frames * (height // 2) * (width // 2), "patches of Wan 2.1"
            assert load.tokens == samples * load.sequence_length and load.has_pixels == 0
            assert load.loss_weight > 0 and load.predicted_cost == samples * load.sequence_length**2.0
            return super().training_step(batch, batch_idx)

    module = Reading()
    data = VideoDataModule(write_shards(tmp_path, 20), budget=BucketBudget(m_mem=160, m_comp=160 * 80))
    trainer_with(max_steps=4).fit(module, data)
    assert len(module.metas) == 4


def test_a_meta_of_ones_own_needs_three_members() -> None:
    meta = SimpleNamespace(samples=2, sequence_length=48, loss_weight=0.5)
    assert load_of({"video": 0, "meta": meta}) == MicroBatchLoad(2, 48, 0.5, has_pixels=1)
    meta.frames = meta.predicted_cost = None
    assert load_of({"video": 0, "meta": meta}) == MicroBatchLoad(2, 48, 0.5, has_pixels=1)


UNREADABLE = SimpleNamespace(samples="two", sequence_length=1, loss_weight=1)


@pytest.mark.parametrize("batch", [[1, 2], {"x": 1}, {"meta": {"samples": 2}}, {"meta": UNREADABLE}])
def test_anything_else_is_none(batch: object) -> None:
    assert load_of(batch) is None
