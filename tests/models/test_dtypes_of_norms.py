"""Fused blocks whose norms of queries and keys have other dtypes than the rest: as eager ones, to the rounding."""

from __future__ import annotations

import pytest
import torch

from lightning_videoscale.injection import inject_fused_kernels
from tests.models.test_fused_families import distance, inputs_of, model_of, run


@pytest.mark.parametrize(("autocast", "bound"), [(False, 1e-5), (True, 0.02)])
@pytest.mark.parametrize("norms", [("norm_k",), ("norm_q", "norm_k")])
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_norms_of_queries_and_keys_may_have_other_dtypes(
    name: str, norms: tuple[str, ...], autocast: bool, bound: float
) -> None:
    model, inputs = model_of(name, 0), inputs_of(name, 0)
    for path, module in model.named_modules():
        if path.endswith(norms):
            module.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_outputs, fused_gradients = run(model, inputs)
    for got, wanted in zip(fused_outputs, outputs, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < bound
    assert distance(fused_gradients, gradients) < bound
