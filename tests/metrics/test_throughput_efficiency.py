"""ThroughputEfficiency against values computed by hand."""

import math

import pytest
import torch

from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.metrics import ThroughputEfficiency


def test_latent_tokens_per_second() -> None:
    efficiency = ThroughputEfficiency()
    efficiency.update(batch_size=2, frames=81, height=480, width=832, seconds=10.0)  # 2 * 21 * 60 * 104 = 262 080
    assert efficiency.compute().item() == 26_208.0
    assert efficiency.compute().dtype == torch.float64


def test_steps_count_by_their_seconds_and_images_have_one_latent_frame() -> None:
    efficiency = ThroughputEfficiency(temporal_stride=4, height_stride=16, width_stride=8)
    efficiency.update(1, 1, 32, 32, seconds=1.0)  # 1 * 2 * 4 = 8
    efficiency.update(1, 5, 32, 32, seconds=3.0)  # 2 * 2 * 4 = 16
    assert efficiency.compute().item() == 6.0


@pytest.mark.parametrize(
    ("family", "tokens"), [("wan2.1", 21 * 60 * 104), ("wan2.2-ti2v-5b", 21 * 30 * 52), ("ltx-video", 11 * 15 * 26)]
)
def test_the_strides_of_a_models_vae(family: str, tokens: int) -> None:
    geometry = GEOMETRIES[family]
    efficiency = ThroughputEfficiency(geometry.temporal_stride, geometry.spatial_stride, geometry.spatial_stride)
    efficiency.update(1, 81, 480, 832, seconds=1.0)
    assert efficiency.compute().item() == tokens


def test_a_long_run_loses_no_token() -> None:
    efficiency = ThroughputEfficiency(1, 1, 1)
    efficiency.update(1, 2**30, 1, 1, seconds=1.0)
    efficiency.update(1, 1, 1, 1, seconds=1.0)  # float32 would drop it
    assert efficiency.compute().item() == (2**30 + 1) / 2


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nan_before_the_first_step_and_after_reset() -> None:
    efficiency = ThroughputEfficiency()
    assert math.isnan(efficiency.compute())
    efficiency.update(1, 1, 8, 8, 1.0)
    efficiency.reset()
    assert math.isnan(efficiency.compute())


def test_refuses_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match=r"\(1, 0, 8, 8\) in 1\.0 s"):
        ThroughputEfficiency().update(1, 0, 8, 8, 1.0)
    with pytest.raises(ValueError, match=r"in 0\.0 s"):
        ThroughputEfficiency().update(1, 1, 8, 8, 0.0)
    with pytest.raises(ValueError, match=r"got \(time, height, width\) = \(4, 0, 8\)"):
        ThroughputEfficiency(4, 0, 8)
