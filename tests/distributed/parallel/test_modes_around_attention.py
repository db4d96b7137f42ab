"""Modes of torch that change attention, as diffusers' perturbed attention guidance has one, are obeyed or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Values(TorchFunctionMode):
    """Returns values in the place of what is attended, as diffusers' mode does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            if given["query"].shape == given["value"].shape:
                return given["value"]
        return func(*args, **kwargs)


def outputs(model: Any, inputs: Any, mode: AbstractContextManager[Any]) -> Tensor:
    with torch.no_grad(), lifted_casts(), mode:
        return run(model, inputs)[0][0]


def found(
    family: str, ring: int, schedule: ScheduleName, backend: AttentionBackend, mode: AbstractContextManager[Any]
) -> float | str:
    """How far a later call inside the mode is from one device, or what is said of it."""
    case = Case(family)
    whole, split = FAMILIES[family].model(case), FAMILIES[family].model(case)
    inputs = FAMILIES[family].inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=2 // ring, ring_size=ring) as mesh:
        parallelize(split, mesh, schedule=schedule, attention_backend=backend)
        plain = outputs(split, inputs, torch.device("cpu"))
        expected = outputs(whole, inputs, mode)
        if isinstance(mode, Values):
            assert float((plain - expected).norm() / expected.norm()) > 1e-3
        try:
            return float((outputs(split, inputs, mode) - expected).norm() / expected.norm())
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("family", ["wan", "cogview4"])
def test_ulysses_obeys_a_mode(ranks: Ranks, family: str) -> None:
    """Also where another kernel than torch's own pick was chosen."""
    for schedule, backend in (("serial", "auto"), ("overlap", "auto"), ("serial", "flash")):
        assert max(ranks(2).run(found, family, 1, schedule, backend, Values())) < 1e-12


@pytest.mark.parametrize(("ring", "schedule"), [(2, "serial"), (1, "sliced")])
@pytest.mark.parametrize("family", ["wan", "cogview4"])
def test_what_calls_no_function_of_torch_refuses_a_mode(
    ranks: Ranks, family: str, ring: int, schedule: ScheduleName
) -> None:
    for said in ranks(2).run(found, family, ring, schedule, "auto", Values()):
        assert "the mode Values around it" in said and "ring_size=1" in said


def test_a_mode_that_says_on_which_device_tensors_are_made_is_none_of_these(ranks: Ranks) -> None:
    assert max(ranks(2).run(found, "wan", 2, "serial", "auto", torch.device("cpu"))) < 1e-12
