"""The heads of networks, as their modules, families or configurations tell them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from examples.joint_dit import JointDiT
from lightning_videoscale.parallel import Attention, SplitPlan, find_plan
from lightning_videoscale.parallel.layout.heads import attention_sizes
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES

OF_DIFFUSERS = [name for name in FAMILIES if name != "own_model"]


@pytest.mark.parametrize("family", OF_DIFFUSERS)
def test_every_family_tells_its_heads(family: str) -> None:
    model = FAMILIES[family].model(Case(family))
    plan = find_plan(model)
    assert plan is not None
    config: Any = model.config
    if family == "z_image":
        mine = config["n_heads"], config["dim"] // config["n_heads"]
    elif family == "kandinsky":
        head_dim = sum(config["axes_dims"])
        mine = config["model_dim"] // head_dim, head_dim
    else:
        mine = config["num_attention_heads"], config["attention_head_dim"]
    sizes = attention_sizes(model, plan)
    assert mine in sizes and len(sizes) >= 2, "one for each module that exchanges"
    if family != "ltx2":  # whose audio has smaller heads
        assert set(sizes) == {mine}


def test_a_model_of_your_own() -> None:
    model = JointDiT(heads=4, width=64)
    plan = SplitPlan({}, {}, {}, {"blocks.*.attention": Attention(("text", "video"))})
    assert attention_sizes(model, plan) == [(4, 16)] * len(model.blocks)
    assert attention_sizes(nn.Linear(2, 2), replace(plan, attention={"": Attention()})) == []


def test_a_function_that_no_test_knows_tells_none() -> None:
    model = FAMILIES["wan"].model(Case("wan"))
    plan = find_plan(model)
    assert plan is not None and attention_sizes(model, plan)
    assert attention_sizes(model, replace(plan, exact=False)) == []
