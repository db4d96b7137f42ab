"""What is said of HunyuanVideo, Framepack and HunyuanVideo-1.5 beside their split plans."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_videoscale.cost import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case
from tests.distributed.families.models.hunyuan_video import FAMILIES
from tests.models import work

NAMES = {
    "hunyuan_video": "hunyuanvideo",
    "hunyuan_video_framepack": "hunyuanvideo-framepack",
    "hunyuan_video_15": "hunyuanvideo-1.5",
}
BLOCKS = {
    "hunyuan_video": ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"],
    "hunyuan_video_framepack": ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"],
    "hunyuan_video_15": ["transformer_blocks.0", "transformer_blocks.1"],
}
TOKENS = {  # of text and video, the history included
    "hunyuan_video": lambda frames: 7 + 9 * frames,
    "hunyuan_video_framepack": lambda frames: 7 + 3 + 9 * (frames + 1) + 4 + 2,
    "hunyuan_video_15": lambda frames: 7 + 9 * frames,
}


def model(family: str, **settings: Any) -> nn.Module:
    return FAMILIES[family].model(Case(family, settings=settings, float32=True))


def forward_flops(family: str, frames: int) -> int:
    return work.forward_flops(FAMILIES[family], Case(family, settings={"frames": frames}, float32=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_neither_patch_embeddings_nor_refiners(family: str) -> None:
    assert list(find_blocks(model(family))) == BLOCKS[family]


def test_a_model_with_a_list_of_blocks_that_is_empty() -> None:
    assert list(find_blocks(model("hunyuan_video_framepack", singles=0))) == ["transformer_blocks.0"]


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_blocks(family: str) -> None:
    """Between two lengths, so that what blocks compute once a sample, their modulation, does not count."""
    network, batch, (few, many) = model(family), 2, (TOKENS[family](frames) for frames in (2, 5))
    flops = TransformerFlops.of_module(network)
    expected = batch * (flops.per_token * (many - few) + flops.per_pair * (many**2 - few**2)) / 4  # 3, and recomputed
    assert forward_flops(family, 5) - forward_flops(family, 2) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes(family: str) -> None:
    """The published models have the defaults of their classes."""
    cls = type(model(family))
    assert work.flops_of_defaults(cls, {}) == TRANSFORMERS[NAMES[family]]


def test_tokens_of_a_clip() -> None:
    assert GEOMETRIES["hunyuanvideo-1.5"].sequence_length(121, 720, 1280) == 31 * 45 * 80 + 1000 + 256 + 729
    assert GEOMETRIES["hunyuanvideo"].sequence_length(129, 720, 1280) == 33 * 45 * 80 + 256
