"""What is said of Flux, SD3, Qwen-Image, Chroma and Z-Image beside their split plans."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_videoscale.cost import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case, Family
from tests.distributed.families.models import chroma, flux, flux2, qwen_image, sd3, z_image
from tests.models import work

FAMILIES: dict[str, Family] = {
    **flux.FAMILIES,
    **sd3.FAMILIES,
    **qwen_image.FAMILIES,
    **flux2.FAMILIES,
    **chroma.FAMILIES,
    **z_image.FAMILIES,
}
BLOCKS = {
    "flux": {"transformer_blocks": 2, "single_transformer_blocks": 2},
    "sd3": {"transformer_blocks": 3},
    "qwen_image": {"transformer_blocks": 2},
    "flux2": {"transformer_blocks": 2, "single_transformer_blocks": 2},
    "chroma": {"transformer_blocks": 2, "single_transformer_blocks": 2},
    "z_image": {"noise_refiner": 1, "context_refiner": 1, "layers": 2},
}
SD35 = {"num_layers": 24, "num_attention_heads": 24, "dual_attention_layers": tuple(range(13))}


def model(family: str, **settings: Any) -> nn.Module:
    return FAMILIES[family].model(Case(family, settings=settings, float32=True))


def forward_flops(family: str, **settings: Any) -> int:
    return work.forward_flops(FAMILIES[family], Case(family, settings={"side": 8} | settings, float32=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks(family: str) -> None:
    expected = [f"{name}.{n}" for name, count in BLOCKS[family].items() for n in range(count)]
    assert list(find_blocks(model(family))) == expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [(family, {}) for family in FAMILIES if family != "z_image"] + [("sd3", {"dual": (0, 2), "norm": "rms_norm"})],
    ids=str,
)
def test_flops_are_those_of_the_blocks(family: str, settings: dict[str, Any]) -> None:
    """Between two lengths, so that what blocks compute once a sample, their modulation, does not count."""
    batch, few, many = 2, 64 * 2 + 7, 64 * 5 + 7
    flops = TransformerFlops.of_module(model(family, **settings))
    expected = batch * (flops.per_token * (many - few) + flops.per_pair * (many**2 - few**2)) / 4  # 3, and recomputed
    if settings:  # the second attention is of the image alone
        expected -= batch * 2 * 4 * sd3.WIDTH * ((many**2 - few**2) - (many - 7) ** 2 + (few - 7) ** 2)
    counted = forward_flops(family, frames=5, **settings) - forward_flops(family, frames=2, **settings)
    assert counted == pytest.approx(expected, rel=2e-3 if settings else 0)  # by the middle of an MLP, which is whole


def test_flops_of_samples_that_are_padded() -> None:
    """A sample of 7 tokens of text and 64 or 320 of the image: they are 32 of text, and refined by themselves."""
    flops = TransformerFlops.of_module(model("z_image"))
    text, few, many = 32, 64 * 2, 64 * 5
    whole = flops.per_token * (many - few) + flops.per_pair * ((many + text) ** 2 - (few + text) ** 2)
    counted = forward_flops("z_image", frames=5, batch=1) - forward_flops("z_image", frames=2, batch=1)
    pairs_of_both = (many + text) ** 2 - (few + text) ** 2 - many**2 + few**2  # text and image, in one layer
    expected = whole / 4 - 4 * z_image.WIDTH * pairs_of_both
    assert counted == pytest.approx(expected, rel=5e-3)  # by the middle of an MLP, 341 for 341 1/3


@pytest.mark.parametrize(
    ("family", "name", "sizes"),
    [
        ("flux", "flux", {}),
        ("sd3", "sd3-medium", {"num_layers": 24, "num_attention_heads": 24}),
        ("sd3", "sd3.5-medium", SD35),
        ("sd3", "sd3.5-large", {"num_layers": 38, "num_attention_heads": 38}),
        ("qwen_image", "qwen-image", {}),
        ("flux2", "flux2-dev", {}),
        ("flux2", "flux2-klein-4b", {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24}),
        ("flux2", "flux2-klein-9b", {"num_single_layers": 24, "num_attention_heads": 32}),
        ("chroma", "chroma", {}),
        ("z_image", "z-image", {}),
    ],
)
def test_published_sizes(family: str, name: str, sizes: dict[str, Any]) -> None:
    """Those of the classes' defaults, and what diffusers' scripts of conversion say for others."""
    cls = type(model(family))
    assert work.flops_of_defaults(cls, sizes) == TRANSFORMERS[name]


def test_a_second_attention_counts_as_a_layers() -> None:
    one, two = TRANSFORMERS["sd3-medium"], TRANSFORMERS["sd3.5-medium"]
    assert two.per_pair == one.per_pair * (24 + 13) / 24
    assert two.per_token - one.per_token == pytest.approx(4 * 13 * 8 * 1536**2, rel=1e-3)


def test_tokens_of_an_image() -> None:
    expected = {"flux": 512, "sd3": 333, "qwen-image": 512, "flux2": 512, "chroma": 512, "z-image": 512}
    for name, text in expected.items():
        assert GEOMETRIES[name].sequence_length(1, 1024, 768) == 64 * 48 + text
