"""States of metrics keep their dtype where the module around them changes its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_videoscale.metrics import PhysicalLoad, StepTimeSpread

CASTS: dict[str, Callable[[nn.Module], object]] = {
    "to": lambda module: module.to(torch.bfloat16),
    "to with device": lambda module: module.to("cpu", torch.float16),
    "half": lambda module: module.half(),
    "type": lambda module: module.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_module_leaves_the_sums_of_its_metrics_exact(cast: Callable[[nn.Module], object]) -> None:
    module = nn.ModuleDict({"spread": StepTimeSpread(), "load": PhysicalLoad(), "linear": nn.Linear(1, 1)})
    spread, load = module["spread"], module["load"]
    spread.update(torch.tensor([1.0, 0.7], dtype=torch.float64))
    cast(module)
    for _ in range(300):
        spread.update(torch.tensor([1.0, 0.7], dtype=torch.float64))
        load.update(torch.tensor([3]), torch.tensor([1001]))
    assert spread.steps == 301 and spread.compute().dtype == torch.float64
    assert spread.compute().item() == pytest.approx(0.3, rel=1e-12)
    assert load.compute()["mean"] == 3 * 1001**2
    assert module["linear"].weight.dtype != torch.float32


def test_states_are_of_their_dtype_after_a_reset_too() -> None:
    spread = StepTimeSpread().to(torch.bfloat16)
    spread.reset()
    assert spread.steps.dtype == torch.float64


def test_states_still_move_between_devices() -> None:
    spread = StepTimeSpread()
    spread.update(torch.tensor([1.0, 0.5]))
    module = nn.ModuleDict({"spread": spread})
    module.to("meta", torch.bfloat16)
    assert spread.steps.device.type == "meta" and spread.device.type == "meta"
    module.to_empty(device="cpu")
    assert spread.steps.device.type == "cpu" and spread.steps.dtype == torch.float64


def test_a_dtype_that_is_asked_for_is_taken() -> None:
    assert StepTimeSpread().set_dtype(torch.float32).steps.dtype == torch.float32
