"""What is peculiar to Wan's kin: masks that are refused, fused kernels inside, blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, Split, find_plan, parallelize
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case, errors_of
from tests.distributed.families.models.wan import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def said_of_causal_skyreels() -> str:
    case = Case("skyreels_v2", settings={"frames": 4}, float32=True)
    model = FAMILIES["skyreels_v2"].model(case)
    model._set_ar_attention(2)
    parallelize(model, SequenceMesh.create("cpu", ulysses_size=2))
    try:
        model(**FAMILIES["skyreels_v2"].inputs(case, 0))
    except ValueError as error:
        return str(error)
    return ""


def test_block_causal_attention_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for said in ranks(2).run(said_of_causal_skyreels):
        assert "SkyReelsV2Transformer3DModel cannot be split" in said and "num_frame_per_block=2" in said


def said_of_a_skipped_block() -> str:
    """Rank 1 exchanges in its second block what rank 0 exchanges in its first."""
    case = Case("wan", float32=True)
    model: Any = FAMILIES["wan"].model(case)
    parallelize(model, SequenceMesh.create("cpu", ulysses_size=2))
    if dist.get_rank() == 1:
        model.blocks[0].forward = lambda x, *_: x
    try:
        model(**FAMILIES["wan"].inputs(case, 0))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_wan_that_skip_other_blocks_are_told(ranks: Ranks) -> None:
    for said in ranks(2).run(said_of_a_skipped_block):
        assert "rank 0 came to blocks.0.attn1, rank 1 came to blocks.1.attn1" in said


def said_of_other_streams() -> list[str]:
    case, found = Case("wan_vace", float32=True), []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for place in ("blocks.0", "vace_blocks.0"):
            model = FAMILIES["wan_vace"].model(case)
            plan = find_plan(model)
            assert plan is not None
            tokens = {**plan.inputs[place], "hidden_states": Split(1, ("streem",))}
            parallelize(model, mesh, replace(plan, inputs={**plan.inputs, place: tokens}))
            try:
                model(**FAMILIES["wan_vace"].inputs(case, 0))
            except ValueError as error:
                found.append(str(error))
    return found


def test_streams_that_wan_does_not_attend_over_are_refused(ranks: Ranks) -> None:
    for found in ranks(2).run(said_of_other_streams):
        assert len(found) == 2 and all("['streem']" in said and "attn1" in said for said in found)


def errors_of_columns() -> list[float]:
    """Outputs' and gradients', where timesteps of samples are (B, 1)."""
    found = []
    for family in ("wan", "chronoedit"):
        for fused, schedule in ((False, "serial"), (True, "sliced")):
            case = Case(family, (1, 1, 2), {"timesteps": "column"}, fused=fused, schedule=schedule)  # type: ignore[arg-type]
            errors = errors_of(case, FAMILIES[family])
            found += [errors["outputs"], errors["gradients"]]
    return found


def test_timesteps_of_samples_may_have_a_dim_of_tokens(ranks: Ranks) -> None:
    assert max(error for found in ranks(2).run(errors_of_columns) for error in found) < 1e-12


def fused_vace() -> tuple[str, torch.Tensor, torch.Tensor]:
    """What was fused, and outputs on slices and on one device."""
    family, case = FAMILIES["wan_vace"], Case("wan_vace", float32=True)
    whole, fused = family.model(case), family.model(case)
    report = inject_fused_kernels(fused)
    parallelize(fused, SequenceMesh.create("cpu", ulysses_size=2))
    inputs = family.inputs(case, 0)
    with torch.no_grad():
        return str(report), fused(**inputs).sample, whole(**inputs).sample


def test_wan_blocks_inside_vace_are_fused_and_split(ranks: Ranks) -> None:
    for said, got, expected in ranks(2).run(fused_vace):
        assert "WanTransformerBlock" in said and "WanAttention" in said
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def logged(names: list[str]) -> list[list[str]]:
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for name in names:
            lines: list[str] = []
            parallelize(FAMILIES[name].model(Case(name)), mesh, log=lines.append)
            found.append(lines)
    return found


def test_what_costs_time_is_logged_once(ranks: Ranks) -> None:
    (wan, animate), others = ranks(2).run(logged, ["wan", "wan_animate"])
    assert others == [[], []] and wan == []
    redirected, whole = animate
    assert "3 modules (3 blocks.*.attn1)" in redirected and "serially" in redirected
    assert "3 modules (3 face_adapter.*)" in whole and "slow" in whole


def test_control_blocks_and_face_adapters_are_blocks() -> None:
    def blocks(name: str) -> list[str]:
        return list(find_blocks(FAMILIES[name].model(Case(name))))

    assert blocks("wan_vace") == ["vace_blocks.0", "vace_blocks.1", "blocks.0", "blocks.1"]
    assert blocks("wan_animate") == [f"{kind}.{n}" for kind in ("blocks", "face_adapter") for n in range(3)]
    assert blocks("skyreels_v2") == blocks("chronoedit") == ["blocks.0", "blocks.1"]
