"""Every family's blocks with fused kernels on a GPU: outputs and gradients as near to float64 as diffusers'."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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

pytestmark = pytest.mark.gpu
CASES = FIRST + OTHERS
BACKENDS: list[BackendName] = ["reference", "triton", "cuda"]
HEAD_DIMS = {"ltx2": 32, "mochi": 16, "wan": 16, "wan_vace": 16, "chronoedit": 16, "skyreels_v2": 16, "wan_animate": 16}
"""Of the families whose models on CPUs have heads that are too small for CUDA kernels."""
BATCHES = 16
TELLING = 0.5
"""The relative error of gradients up to which it says something that another one is as large."""


def settings_of(name: str, place: int) -> dict[str, Any]:
    wider = {"head_dim": HEAD_DIMS[name]} if name in HEAD_DIMS else {}
    return {**FAMILIES[name].variants[place], **wider}


def inputs_of(name: str, place: int, batch: int) -> dict[str, Any]:
    return dict(FAMILIES[name].inputs(Case(name, settings=settings_of(name, place), float32=True), batch))


def on_gpu(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: on_gpu(x) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map(on_gpu, inputs))
    return inputs.cuda() if isinstance(inputs, Tensor) else inputs


def exactly(model: nn.Module, inputs: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients in float64, on the CPU: what a GPU computes is compared with something else."""
    with lifted_casts():
        outputs, gradients = run(model, cast(inputs, torch.float64))
    return [x.cuda() for x in outputs], {name: g.cuda() for name, g in gradients.items()}


def off(outputs: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative error of an output."""
    return max(float((y - x).norm() / x.norm()) for y, x in zip(outputs, right, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_as_exact_in_float32(name: str, place: int, backend: BackendName) -> None:
    """Not to the bit: a GPU's own norms and complex products round elsewhere."""
    eager, inputs = model_of(name, place, **settings_of(name, place)), inputs_of(name, place, 0)
    right, exact = exactly(copy.deepcopy(eager).double(), inputs)
    fused = copy.deepcopy(eager.cuda())
    report = inject_fused_kernels(fused, backend=backend)
    assert place or not report.skipped
    with lifted_casts(torch.float32):
        expected, of_eager = run(eager, on_gpu(inputs))
        outputs, of_fused = run(fused, on_gpu(inputs))
    assert off(outputs, right) <= max(1e-6, 2 * off(expected, right))
    bound = 1e-3 if type(eager).__name__ in ROUNDED_GRADIENTS else 1e-5
    assert gradient_error(of_fused, exact) <= max(bound, 2 * gradient_error(of_eager, exact))


def times_as_large(errors: list[float], of_eager: list[float]) -> tuple[float, float]:
    """The geometric mean of the ratios of errors batch by batch, and what it is at least, two standard errors below.

    Roundings that differ in the last bit of a few sums are enough for a ratio of one batch to be 0.5 or 2.
    """
    logs = [math.log(mine / theirs) for mine, theirs in zip(errors, of_eager, strict=True)]
    below = 2 * stdev(logs) / len(logs) ** 0.5
    return math.exp(mean(logs)), math.exp(mean(logs) - below)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_as_exact_in_bfloat16(name: str, place: int, backend: BackendName) -> None:
    """Over batches enough for the ratio of errors to mean something, unless gradients are mostly rounding.

    Attention is torch's plain one: its flash kernel's backward gives NaN for heads of 8 channels, with or without ours.
    """
    eager = half(model_of(name, place, **settings_of(name, place)))
    exact = copy.deepcopy(eager).double()
    fused = copy.deepcopy(eager.cuda())
    inject_fused_kernels(fused, backend=backend)
    outputs_off: dict[str, list[float]] = {"eager": [], "fused": []}
    gradients_off: dict[str, list[float]] = {"eager": [], "fused": []}
    for batch in range(BATCHES):
        inputs = cast(inputs_of(name, place, batch), torch.bfloat16)
        right, exact_gradients = exactly(exact, inputs)
        for key, model in (("eager", eager), ("fused", fused)):
            with sdpa_kernel(SDPBackend.MATH):
                outputs, gradients = run(model, on_gpu(inputs))
            outputs_off[key].append(off(outputs, right))
            gradients_off[key].append(distance(gradients, exact_gradients))
    ratio, least = times_as_large(outputs_off["fused"], outputs_off["eager"])
    assert least <= 1.05, ratio
    own = mean(gradients_off["eager"])
    if own > TELLING:
        pytest.skip(f"gradients of {name} without kernels are {own:.0%} off in bfloat16")
    ratio, least = times_as_large(gradients_off["fused"], gradients_off["eager"])
    assert least <= 1.05, ratio
