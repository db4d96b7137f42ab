"""Every family on slices gives the outputs, the loss and the gradients of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.distributed.families.harness import Case, Family, errors_of
from tests.distributed.families.models import (
    allegro,
    anyflow,
    chroma,
    cogvideox,
    cogview4,
    cosmos,
    easyanimate,
    flux,
    flux2,
    helios,
    hunyuan_video,
    kandinsky,
    ltx,
    minimax_h3,
    mochi,
    motif_video,
    own_model,
    pixart,
    qwen_image,
    sd3,
    wan,
    z_image,
)
from tests.distributed.pool import ProcessPool
from tests.support.record import confirm

Ranks = Callable[[int], ProcessPool]

FAMILIES: Mapping[str, Family] = {
    **cogvideox.FAMILIES,
    **flux.FAMILIES,
    **sd3.FAMILIES,
    **qwen_image.FAMILIES,
    **flux2.FAMILIES,
    **chroma.FAMILIES,
    **z_image.FAMILIES,
    **hunyuan_video.FAMILIES,
    **ltx.FAMILIES,
    **cosmos.FAMILIES,
    **kandinsky.FAMILIES,
    **mochi.FAMILIES,
    **cogview4.FAMILIES,
    **easyanimate.FAMILIES,
    **allegro.FAMILIES,
    **pixart.FAMILIES,
    **helios.FAMILIES,
    **minimax_h3.FAMILIES,
    **motif_video.FAMILIES,
    **anyflow.FAMILIES,
    **own_model.FAMILIES,
    **wan.FAMILIES,
}

LENGTHS: list[dict[str, Any]] = [
    {"text": 7, "frames": 3, "side": 3},
    {"text": 1, "batch": 1},
    {"text": 2, "batch": 3},
    {"text": 16, "frames": 1, "side": 4, "batch": 1},  # as many tokens as the video
]
AT_ONCE = 12
"""Cases of one call of a pool."""

KINDS = ("cogvideox", "flux", "z_image", "hunyuan_video", "ltx2", "cosmos", "kandinsky", "mochi", "wan", "wan_vace")
"""Families that build blocks each in a way of their own: what `make test` runs of what comes on top of exactness."""

MESHES = [(1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 1, 3)]


def one_of_each_kind(families: Iterable[str]) -> list[Any]:
    """The families, of which all but `KINDS` are for `make test-full`."""
    assert FAMILIES.keys() >= {*KINDS}
    return [family if family in KINDS else pytest.param(family, marks=pytest.mark.full) for family in families]


def errors(cases: list[Case]) -> list[dict[str, float]]:
    return [errors_of(case, FAMILIES[case.family]) for case in cases]


def check(ranks: Ranks, cases: list[Case]) -> float:
    """Returns the largest error of gradients."""
    largest = 0.0
    for size in sorted({case.ranks for case in cases}):
        of_size = [case for case in cases if case.ranks == size]
        for start in range(0, len(of_size), AT_ONCE):
            some = of_size[start : start + AT_ONCE]
            for of_rank in ranks(size).run(errors, some):
                for case, found in zip(some, of_rank, strict=True):
                    bound = 1e-5 if case.float32 else 1e-10
                    assert found["norm"] > 1e-3, case
                    assert {name: e for name, e in found.items() if name != "norm" and not e <= bound} == {}, case
                    largest = max(largest, found["gradients"])
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact(ranks: Ranks, family: str) -> None:
    cases = [Case(family, (1, 2, 2), LENGTHS[0], checkpointing=True), Case(family, (1, 1, 4), LENGTHS[1])]
    check(ranks, cases[: 1 + (family in KINDS)])
    confirm(family, "Ulysses", "ring", "checkpointing")


FUSED = (
    *cogvideox.FAMILIES,
    *hunyuan_video.FAMILIES,
    *ltx.FAMILIES,
    *mochi.FAMILIES,
    *kandinsky.FAMILIES,
    *cosmos.FAMILIES,
    *sd3.FAMILIES,
    *flux.FAMILIES,
    *flux2.FAMILIES,
    *chroma.FAMILIES,
    *qwen_image.FAMILIES,
    *z_image.FAMILIES,
    *wan.FAMILIES,
)


@pytest.mark.parametrize("family", one_of_each_kind(FUSED))
def test_a_family_with_fused_kernels_is_exact(ranks: Ranks, family: str) -> None:
    """The last variant too: a first frame of another timestep, timesteps of tokens, an image."""
    variants = FAMILIES[family].variants[:: max(1, len(FAMILIES[family].variants) - 1)]
    check(ranks, [Case(family, (1, 1, 2), LENGTHS[0] | settings, fused=True) for settings in variants])
    confirm(family, "fused parts")


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_in_all_settings(ranks: Ranks, family: str, mesh: tuple[int, int, int], fused: bool) -> None:
    if fused and family not in FUSED:
        pytest.skip("no fused blocks are known of it")
    check(
        ranks,
        [
            Case(family, mesh, lengths | variant, checkpointing, float32, fused)
            for lengths in LENGTHS
            for variant in FAMILIES[family].variants
            for checkpointing in (False, True)
            for float32 in (False, True)
        ],
    )
