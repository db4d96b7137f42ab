"""Plans: of families, found in a module, written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from torch import nn

from lightning_videoscale.parallel import (
    Attention,
    SequenceMesh,
    Split,
    SplitPlan,
    find_plan,
    find_planned_modules,
    parallelize,
)
from lightning_videoscale.parallel.plan import known_models
from tests.models import tiny_wan


def test_the_plan_of_wan() -> None:
    plan = find_plan(tiny_wan())
    assert plan is not None
    assert plan.inputs["blocks.0"] == {"hidden_states": Split(dim=1)}
    assert plan.inputs[""] == {"timestep": Split(dim=1, ndim=2, broadcasts=True)}
    assert plan.outputs["rope"] == {0: Split(dim=1, keeps_whole=True), 1: Split(dim=1, keeps_whole=True)}
    assert plan.gathers == {"proj_out": {0: Split(dim=1)}}


def test_what_is_no_module_is_named() -> None:
    pipeline = cast(nn.Module, SimpleNamespace(transformer=tiny_wan()))
    with pytest.raises(TypeError, match=r"SimpleNamespace is no nn.Module: .*pipeline.transformer"):
        parallelize(pipeline, cast(SequenceMesh, None))


def test_a_subclass_has_its_parents_plan() -> None:
    model = tiny_wan()
    model.__class__ = type("MyWan", (type(model),), {})
    assert find_plan(model) is not None


def test_the_outermost_networks_with_a_plan_are_found() -> None:
    module = nn.ModuleDict({"vae": nn.Linear(2, 2), "nets": nn.ModuleDict({"student": tiny_wan()})})
    assert list(find_planned_modules(module)) == ["nets.student"]
    assert find_planned_modules(nn.Linear(2, 2)) == {}
    assert {"HunyuanVideoTransformer3DModel", "WanTransformer3DModel"} < set(known_models())


def test_a_plan_by_paths_says_how_other_schedules_run() -> None:
    with pytest.raises(ValueError, match="needs hide_exchange="):
        SplitPlan({}, {}, {}, {"attn": Attention()}, schedules=("serial", "sliced"))
