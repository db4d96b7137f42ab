"""Masks that are no bool: in every call, 0 and -inf say which keys count, and any other bias is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, parallelize
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.parallel.test_masked_samples import PLAN, TEXT, Network, hiding, pass_of
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

MASK = hiding((0, TEXT))
HIDING = torch.zeros(MASK.shape).masked_fill(~MASK, -torch.inf).double()
ON_A_RANK = HIDING.clone()
ON_A_RANK[..., -1] = 0.5  # of a key of the last rank


class Counting(CollectiveTransport):
    gathers = 0

    def all_gather(self, *args: Any) -> Tensor:
        self.gathers += 1
        return super().all_gather(*args)


def error(split: Network, mask: Tensor) -> float:
    """How far a split network is from a whole one."""
    split.zero_grad()
    mine = pass_of(split, mask)
    for gradient in mine[1:]:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return max(float((a - b).abs().max()) for a, b in zip(mine, pass_of(Network().double(), mask), strict=True))


def later_calls(ring: int) -> tuple[list[str], list[float], int]:
    """Behind a call with a mask that is bool: what is said of biases, errors of others, and how often ranks look."""
    said, transport, split = [], Counting(), Network().double()
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size() // ring, ring_size=ring) as mesh:
        parallelize(split, mesh, PLAN, transport=transport, verify_plan=False)
        error(split, MASK)
        for bias in (MASK.double(), ON_A_RANK):
            with pytest.raises(ValueError) as refused:
                pass_of(split, bias)
            said.append(str(refused.value))
        errors, gathers = [], []
        for mask in (MASK, HIDING):
            transport.gathers = 0
            errors.append(error(split, mask))
            gathers.append(transport.gathers)
    return said, errors, gathers[1] - gathers[0]


@pytest.mark.parametrize("ring", [1, 2])
def test_a_bias_of_a_later_call_is_refused_on_all_ranks(ranks: Ranks, ring: int) -> None:
    for said, errors, looks in ranks(2).run(later_calls, ring):
        assert all("blocks.0" in each and "bias other than 0" in each for each in said)
        assert max(errors) < 1e-12
        assert looks == 1  # for both layers


def compiled() -> tuple[float, Tensor]:
    """How far compiled code is from a whole network, and what it makes of another bias."""
    split = Network().double()
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        parallelize(split, mesh, PLAN, verify_plan=False)
        compile_blocks(split, {"backend": "aot_eager", "fullgraph": True})
        for _ in range(2):  # the first is eager
            found = error(split, HIDING)
        return found, pass_of(split, MASK.double())[0]


@pytest.mark.full
def test_compiled_code_makes_nan_of_a_bias(ranks: Ranks) -> None:
    for found, output in ranks(2).run(compiled):
        assert found < 1e-12
        assert output.isnan().all()
