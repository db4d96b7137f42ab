"""Caches of diffusers that decide by the step sample alike where the sequence is split, whenever they are enabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LayerSkipConfig, MagCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import TaylorSeerCacheConfig, apply_layer_skip
from torch import Tensor

from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

STEPS = 5
CACHES: dict[str, Callable[[], Any]] = {
    "steps": lambda: MagCacheConfig(
        threshold=0.5, max_skip_steps=2, retention_ratio=0.2, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
    ),
    "attention": lambda: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
    "predictions": lambda: TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, max_order=1, taylor_factors_dtype=torch.float32
    ),
}


def sampled(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """What a network returns in some steps of a sampler."""
    with torch.no_grad(), model.cache_context("cond"):
        return [model(**inputs | {"hidden_states": inputs["hidden_states"] + n}).sample for n in range(STEPS)]


def errors(name: str, cache: str, before: bool) -> list[float]:
    """By step, how far a split network with a cache is from a whole one."""
    family, case = FAMILIES[name], Case(name, float32=True)
    whole, split = family.model(case).eval(), family.model(case).eval()
    inputs = dict(family.inputs(case, 0))
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        whole.enable_cache(CACHES[cache]())
        if before:
            split.enable_cache(CACHES[cache]())
        parallelize(split, mesh)
        if not before:
            split.enable_cache(CACHES[cache]())
        pairs = zip(sampled(split, inputs), sampled(whole, inputs), strict=True)
        return [float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("name", "cache"), [("wan", "steps"), ("flux", "predictions"), ("cogvideox", "attention"), ("cogvideox", "steps")]
)
def test_a_cache_that_is_enabled_before_the_first_call(ranks: Ranks, name: str, cache: str, before: bool) -> None:
    """Before or after the split; attention that a cache skips has nothing to exchange."""
    for of_rank in ranks(2).run(errors, name, cache, before):
        assert max(of_rank) < 1e-4, of_rank


def error_of_skipped_attention() -> float:
    """Of a hook from before the split that skips the attention of a block."""
    family, case = FAMILIES["cogview4"], Case("cogview4", float32=True)
    whole, split, inputs = family.model(case), family.model(case), family.inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, torch.no_grad():
        for model in (whole, split):
            apply_layer_skip(model, LayerSkipConfig(indices=[1], skip_ff=False))
        parallelize(split, mesh)
        mine, theirs = split(**inputs).sample, whole(**inputs).sample
        return float((mine - theirs).norm() / theirs.norm())


def test_attention_that_a_hook_skips_has_nothing_to_exchange(ranks: Ranks) -> None:
    assert max(ranks(2).run(error_of_skipped_attention)) < 1e-4
