"""What is said of LTX-Video, LTX-2, CogVideoX and ConsisID beside their split plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from lightning_videoscale.cost import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case, Family
from tests.distributed.families.models import cogvideox, ltx
from tests.models import work

FAMILIES: dict[str, Family] = {**cogvideox.FAMILIES, **ltx.FAMILIES}


def model(family: str, **settings: Any) -> nn.Module:
    return FAMILIES[family].model(Case(family, settings=settings, float32=True))


def forward_flops(family: str, frames: int) -> int:
    """A cross-attention's keys and values of text do not change with the video's length."""
    case = Case(family, settings={"frames": frames, "face": False}, float32=True)
    return work.forward_flops(FAMILIES[family], case)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_neither_patch_embeddings_nor_faces(family: str) -> None:
    assert list(find_blocks(model(family))) == ["transformer_blocks.0", "transformer_blocks.1"]


@pytest.mark.parametrize(("family", "text"), [("cogvideox", 7), ("consisid", 7), ("ltx", 0)])
def test_flops_are_those_of_the_blocks(family: str, text: int) -> None:
    """Between two lengths, so that what blocks compute once a sample, their modulation, does not count."""
    batch, few, many = 2, 9 * 2 + text, 9 * 5 + text
    flops = TransformerFlops.of_module(model(family, face=False))
    expected = batch * (flops.per_token * (many - few) + flops.per_pair * (many**2 - few**2)) / 4  # 3, and recomputed
    of_text = 0 if text else 2 * batch * 2 * 2 * 7 * 32 * 27  # two products, two blocks: video that attends to text
    assert forward_flops(family, 5) - forward_flops(family, 2) - of_text == expected


@pytest.mark.parametrize(
    ("family", "name", "sizes"),
    [
        ("ltx", "ltx-video", {}),
        ("ltx2", "ltx-2", {}),
        ("cogvideox", "cogvideox-2b", {}),
        ("cogvideox", "cogvideox-5b", {"num_layers": 42, "num_attention_heads": 48}),
    ],
)
def test_published_sizes(family: str, name: str, sizes: dict[str, int]) -> None:
    """Those of the classes' defaults, and what diffusers' scripts of conversion say for the larger CogVideoX."""
    cls = type(model(family))
    assert work.flops_of_defaults(cls, sizes) == TRANSFORMERS[name]


def test_tokens_of_a_clip() -> None:
    assert GEOMETRIES["ltx-2"].sequence_length(121, 512, 768) == 16 * 16 * 24
    assert GEOMETRIES["cogvideox"].sequence_length(49, 480, 720) == 13 * 30 * 45 + 226
    padded, even = (GEOMETRIES["cogvideox-1.5"].sequence_length(frames, 768, 1360) for frames in (81, 85))
    assert padded == even == 11 * 48 * 85 + 226  # 21 latent frames get one more
    latents = GEOMETRIES["cogvideox-1.5"].sequence_length(np.array([21, 22, 23]), 96, 170, latents=True)
    assert latents.tolist() == [even, even, even + 48 * 85]
    with pytest.raises(ValueError, match="21, 96, 170"):
        replace(GEOMETRIES["cogvideox-1.5"], pads_frames=False).sequence_length(81, 768, 1360)
