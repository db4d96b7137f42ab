"""What cannot be split is an error on all ranks that says why: whole classes, and calls of a class that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from lightning_videoscale.families import AllFamilies
from lightning_videoscale.parallel import SequenceMesh, parallelize, refusals
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.support.record import SPLIT, recorded

Ranks = Callable[[int], ProcessPool]

REFUSED = {
    "SanaTransformer2DModel": "linear attention",
    "SanaVideoTransformer3DModel": "linear attention",
    "LatteTransformer3DModel": "by turns within a frame",
    "Cosmos3OmniTransformer": "attends twice",
    "AnyFlowFARTransformer3DModel": "causal by blocks of frames",
}
CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mochi", {"encoder_attention_mask": torch.tensor([[1, 0, 1, 1, 0, 0, 0]] * 2)}, ["text behind padding"]),
    ("kandinsky", {"sparse_params": {"to_fractal": False}}, ["sparse_params", "NABLA"]),
    ("cogview4", {"attention_mask": torch.ones(2, 7)}, ["attention_mask", "bias of 1 and 0"]),
    ("cogview4", {"attention_kwargs": {"batch_flag": torch.zeros(2)}}, ["batch_flag"]),
    ("allegro", {"attention_mask": torch.ones(2, 3, 3, 3)}, ["attention_mask", "for each head"]),
    ("chroma", {"attention_mask": torch.ones(2, 7 + 27)}, ["attention_mask is torch.float32", "as bool"]),
    ("pixart", {"attention_mask": torch.ones(2, 27)}, ["attention_mask", "encoder_attention_mask"]),
]


def unbuilt(name: str) -> nn.Module:
    """Of a class, without any weights."""
    model: nn.Module = object.__new__(getattr(diffusers, name))
    nn.Module.__init__(model)
    return model


def said_of_classes() -> list[str]:
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for name in REFUSED:
            with pytest.raises(ValueError) as error:
                parallelize(unbuilt(name), mesh)
            found.append(str(error.value))
    return found


def test_classes_that_are_refused(ranks: Ranks) -> None:
    assert {path.rpartition(".")[2] for path in AllFamilies[str]("REFUSALS")} == {*REFUSED}
    for of_rank in ranks(2).run(said_of_classes):
        for said, (name, reason) in zip(of_rank, REFUSED.items(), strict=True):
            assert said.startswith(f"{name} cannot be split") and reason in said
            assert recorded()[name, SPLIT].reason in said


def test_a_refused_network_inside_a_module_is_found() -> None:
    inside = nn.ModuleDict({"vae": nn.Linear(2, 2), "network": unbuilt("LatteTransformer3DModel")})
    assert [*refusals(inside)] == ["LatteTransformer3DModel"]
    assert refusals(nn.Linear(2, 2)) == {}


def said_of_calls() -> list[list[str]]:
    """At the first call, and at one after a call that was split."""
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for name, change, _ in CALLS:
            family, case, said = FAMILIES[name], Case(name, float32=True), []
            model, inputs = family.model(case), family.inputs(case, 0)
            parallelize(model, mesh)
            for _ in range(2):
                with pytest.raises(ValueError) as error:
                    model(**inputs | change)
                said.append(str(error.value))
                model(**inputs)
            found.append(said)
    return found


def test_calls_that_are_refused(ranks: Ranks) -> None:
    for of_rank in ranks(2).run(said_of_calls):
        for messages, (name, change, words) in zip(of_rank, CALLS, strict=True):
            whole_call = name in ("mochi", "chroma") or "attention_kwargs" in change  # it depends on what they are
            refusal = "cannot be split in this call" if whole_call else "cannot be given where the sequence is split"
            for said in messages:
                assert refusal in said, (name, said)
                assert all(word in said for word in words), (name, said)
