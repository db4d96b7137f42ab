"""Every family's blocks with fused kernels on a GPU: the outputs and gradients of diffusers, as near to float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.kernels.backend import BackendName
from tests.distributed.families.harness import Case, lifted_casts
from tests.models import gradient_error
from tests.models.test_fused_families import (
    FAMILIES,
    FIRST,
    OTHERS,
    ROUNDED_GRADIENTS,
    cast,
    distance,
    half,
    model_of,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = FIRST + OTHERS
KERNELS: list[BackendName] = ["triton", "cuda"]
BATCHES = 6


def inputs_of(name: str, place: int, batch: int = 0) -> dict[str, Any]:
    family = FAMILIES[name]
    case = Case(name, settings=family.variants[place], float32=True)
    inputs: dict[str, Any] = on_gpu(dict(family.inputs(case, batch)))
    return inputs


def on_gpu(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: on_gpu(x) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map(on_gpu, inputs))
    return inputs.cuda() if isinstance(inputs, Tensor) else inputs


def bound_of(model: nn.Module) -> float:
    return 1e-3 if type(model).__name__ in ROUNDED_GRADIENTS else 1e-5


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_reference_gives_the_same_output_to_the_bit(name: str, place: int) -> None:
    model, inputs = model_of(name, place).cuda(), inputs_of(name, place)
    expected, gradients = run(model, inputs)
    inject_fused_kernels(model, backend="reference")
    outputs, fused = run(model, inputs)
    assert all(map(torch.equal, outputs, expected))
    assert gradient_error(fused, gradients) < bound_of(model)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_kernels_agree_in_float32(name: str, place: int, backend: BackendName) -> None:
    model, inputs = model_of(name, place).cuda(), inputs_of(name, place)
    expected, gradients = run(model, inputs)
    assert not inject_fused_kernels(model, backend=backend).skipped or place
    outputs, fused = run(model, inputs)
    for got, wanted in zip(outputs, expected, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5
    assert gradient_error(fused, gradients) < bound_of(model)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_kernels_are_as_exact_in_bfloat16(name: str, place: int, backend: BackendName) -> None:
    """Outputs and gradients of several batches, against float64, beside those of the same model without kernels."""
    eager = half(model_of(name, place)).cuda()
    fused, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    inject_fused_kernels(fused, backend=backend)
    of_gradients, of_outputs = {"eager": 0.0, "fused": 0.0}, {"eager": 0.0, "fused": 0.0}
    for batch in range(BATCHES):
        inputs = cast(inputs_of(name, place, batch), torch.bfloat16)
        with lifted_casts():
            right, exact_gradients = run(exact, cast(inputs, torch.float64))
        for key, model in (("eager", eager), ("fused", fused)):
            outputs, gradients = run(model, inputs)
            of_outputs[key] += sum(float((y - x).square().sum()) for y, x in zip(outputs, right, strict=True))
            of_gradients[key] += distance(gradients, exact_gradients) ** 2
    assert of_outputs["fused"] <= 1.05**2 * of_outputs["eager"], of_outputs
    assert of_gradients["fused"] <= 1.05**2 * of_gradients["eager"], of_gradients
