"""Passes of several lengths before one backward, recomputed: each block uses the tables of its own pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.strategies.blocks import checkpoint_activations
from tests.distributed.families.harness import Case, lifted_casts
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]

LENGTHS = [{"frames": 3}, {"frames": 5, "side": 2}, {"frames": 2}]
"""27, 20 and 18 tokens of video: (14, 13), (10, 10) and (9, 9) over two ranks; text (4, 3)."""


def gradients(model: nn.Module, family: str) -> dict[str, Tensor]:
    losses = []
    for length in LENGTHS:
        outputs = model(**FAMILIES[family].inputs(Case(family, settings=length), 0))
        losses += [x.square().mean() for x in outputs.values() if isinstance(x, Tensor)]
    torch.stack(losses).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def error(family: str, by_the_model: bool) -> float:
    case = Case(family, (1, 1, 2), {"learned": False})
    recomputing = Case(family, case.mesh, case.settings, checkpointing=by_the_model)
    whole, network = FAMILIES[family].model(case), FAMILIES[family].model(recomputing)
    parallelize(network, SequenceMesh.create("cpu", ulysses_size=2))
    if not by_the_model:
        checkpoint_activations(network)
    with lifted_casts():
        expected, got = gradients(whole, family), gradients(network, family)
    sum_over_ranks(got.values(), mean=True)
    return gradient_error(got, expected)


@pytest.mark.parametrize("by_the_model", [True, False])
@pytest.mark.parametrize("family", ["consisid"])  # gathers behind a block, which a checkpoint of the model recomputes
def test_a_block_uses_the_tables_of_its_own_pass(ranks: Ranks, family: str, by_the_model: bool) -> None:
    assert max(ranks(2).run(error, family, by_the_model)) <= 1e-10
