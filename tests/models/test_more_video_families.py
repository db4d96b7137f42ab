"""What is said of the video models that have plans alone, beside these: blocks, work, sizes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_videoscale.cost import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.models import work

TEXT = {"mochi": 7, "cogview4": 7, "easyanimate": 7, "minimax_h3": 12, "motif_video": 7}
"""Tokens that attend together with the video's; elsewhere text enters by cross-attention."""

ALONE = ("cosmos", "kandinsky", "allegro", "pixart", "helios", "anyflow")
BLOCKS = {
    "kandinsky": ["text_transformer_blocks.0", "visual_transformer_blocks.0", "visual_transformer_blocks.1"],
    "helios": ["blocks.0", "blocks.1"],
    "anyflow": ["blocks.0", "blocks.1"],
    "minimax_h3": ["token_refiner.refiner_blocks.0", "transformer_blocks.0", "transformer_blocks.1"],
    "motif_video": ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"],
}
SETTINGS: dict[str, dict[str, Any]] = {"helios": {"history": ()}}


def model(family: str) -> nn.Module:
    return FAMILIES[family].model(Case(family, float32=True))


def forward_flops(family: str, frames: int) -> int:
    case = Case(family, settings=SETTINGS.get(family, {}) | {"frames": frames, "batch": 1}, float32=True)
    return work.forward_flops(FAMILIES[family], case)


@pytest.mark.parametrize("family", [*TEXT, *ALONE])
def test_blocks(family: str) -> None:
    assert list(find_blocks(model(family))) == BLOCKS.get(family, ["transformer_blocks.0", "transformer_blocks.1"])


@pytest.mark.parametrize("family", [*TEXT, *ALONE])
def test_flops_are_those_of_the_blocks(family: str) -> None:
    """Between two lengths, so that what blocks compute once a sample, their modulation, does not count."""
    network, text = model(family), TEXT.get(family, 0)
    few, many = 9 * 2 + text, 9 * 5 + text
    flops = TransformerFlops.of_module(network)
    expected = (flops.per_token * (many - few) + flops.per_pair * (many**2 - few**2)) / 4  # 3, and recomputed
    of_text = 0 if text else flops.layers * 2 * 2 * 7 * flops.width * 27  # two products: video that attends to text
    assert forward_flops(family, 5) - forward_flops(family, 2) - of_text == expected


@pytest.mark.parametrize(
    ("family", "name", "sizes"),
    [
        ("mochi", "mochi-1", {}),
        ("cosmos", "cosmos-1.0-7b", {}),
        ("cosmos", "cosmos-1.0-14b", {"num_attention_heads": 40, "num_layers": 36}),
        ("cosmos", "cosmos-2-2b", {"num_attention_heads": 16}),
        ("kandinsky", "kandinsky-5-lite", {"model_dim": 1792, "ff_dim": 7168}),
        ("kandinsky", "kandinsky-5-pro", {"model_dim": 4096, "ff_dim": 16384, "num_visual_blocks": 60}),
        ("cogview4", "cogview4-6b", {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128}),
        ("easyanimate", "easyanimate-v5.1-12b", {}),
        ("allegro", "allegro", {}),
        ("pixart", "pixart", {}),
        ("helios", "helios-14b", {}),
        ("minimax_h3", "minimax-h3", {}),
        ("anyflow", "anyflow-14b", {}),
    ],
)
def test_published_sizes(family: str, name: str, sizes: dict[str, int]) -> None:
    """Those of the classes' defaults, and what differs from them."""
    cls = type(model(family))
    assert work.flops_of_defaults(cls, sizes) == TRANSFORMERS[name]


def test_tokens_of_a_clip() -> None:
    assert GEOMETRIES["mochi"].sequence_length(163, 480, 848) == 28 * 30 * 53 + 256
    assert GEOMETRIES["cosmos-1.0"].sequence_length(121, 704, 1280) == 16 * 44 * 80
    assert GEOMETRIES["kandinsky-5"].sequence_length(121, 512, 768) == 31 * 32 * 48
    assert GEOMETRIES["cogview4"].sequence_length(1, 1024, 1024) == 64 * 64 + 1024
