"""What a graph would not repeat of a forward is seen when it is inspected, and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import MagCacheConfig
from torch import Tensor, nn

from lightning_videoscale.graphs import calls
from lightning_videoscale.graphs.inspection import inspect_call
from tests.models import tiny_wan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEVICE", "cpu")


def objection(network: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    call = calls.read_call(network, args, kwargs)
    assert isinstance(call, calls.NetworkCall)
    _, seen = inspect_call(network, lambda: network(*args, **kwargs), call, (args, kwargs), None, CPU)
    return seen.objection


class Doing(nn.Module):
    """A linear layer, and something beside it."""

    def __init__(self, what: Callable[[Any, Tensor], Any] = lambda _, x: x) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(3, 3), what
        self.draws, self.of_python, self.of_numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)

    def forward(self, x: Tensor, features: Any = None) -> Any:
        out = self.layer(x)
        if isinstance(features, list):
            features.append(out)
        if isinstance(features, dict):
            features["key"] = out
        return self.what(self, out)


@dataclass
class Output:
    sample: Tensor


def test_a_plain_forward_is_no_objection() -> None:
    assert objection(Doing(), torch.ones(2, 3)) is None
    assert objection(Doing(lambda _, x: {"sample": x, "steps": 3, "name": None}), torch.ones(2, 3)) is None
    assert objection(tiny_wan(), torch.ones(1, 4, 1, 4, 6), torch.ones(1), torch.ones(1, 5, 16)) is None


def test_outputs_of_which_the_tensors_are_not_seen() -> None:
    said = objection(Doing(lambda _, x: (x, Output(x))), torch.ones(2, 3))
    assert said is not None and "Output" in said


@pytest.mark.parametrize("features", [[], {"key": torch.zeros(1)}], ids=str)
def test_containers_that_are_written_into(features: Any) -> None:
    assert objection(Doing(), torch.ones(2, 3), features=features) == "its forward writes to its inputs"


@pytest.mark.parametrize(
    "draw",
    [
        lambda self, x: x if torch.rand((), generator=self.draws) < 2 else -x,
        lambda self, x: x if self.of_python.random() < 2 else -x,
        lambda self, x: x if self.of_numpy.random() < 2 else -x,
    ],
    ids=["torch", "python", "numpy"],
)
def test_decisions_drawn_from_generators_of_its_own(draw: Callable[[Any, Tensor], Tensor]) -> None:
    assert objection(Doing(draw), torch.ones(2, 3)) == "its forward draws random numbers on the host"


def test_a_cache_of_diffusers() -> None:
    model = tiny_wan()
    model.enable_cache(MagCacheConfig(num_inference_steps=4, mag_ratios=torch.ones(4)))
    with model.cache_context("cond"), torch.no_grad():
        said = objection(model, torch.ones(1, 4, 1, 4, 6), torch.ones(1), torch.ones(1, 5, 16))
    assert said is not None and "has a cache" in said
