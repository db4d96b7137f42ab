"""Gradients averaged over all ranks are those of one device, wherever the parameter is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.parallel import (
    CollectiveTransport,
    SequenceContext,
    SequenceMesh,
    gather,
    split,
)
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


class Network(nn.Module):
    """Parameters before the split, inside the region, fed into it from outside, and after the gather."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inside, self.condition, self.after = (nn.Linear(6, 6).double() for _ in range(4))

    def forward(self, x: Tensor, condition: Tensor, context: SequenceContext | None) -> Tensor:
        x = torch.tanh(self.before(x))
        if context is not None:
            x = split(x, 1, context)
        x = torch.tanh(self.inside(x) + self.condition(condition)[:, None])
        if context is not None:
            x = gather(x, 1, context)
        return self.after(x).square().mean()


def gradient_rule_error(length: int) -> float:
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    context = SequenceContext(mesh, CollectiveTransport())
    torch.manual_seed(1)
    x, condition = torch.randn(2, length, 6).double(), torch.randn(2, 6).double()
    whole, sliced = Network(), Network()
    whole(x, condition, None).backward()
    sliced(x, condition, context).backward()
    errors = []
    for expected, got in zip(whole.parameters(), sliced.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        dist.all_reduce(got.grad)
        errors.append(float((got.grad / 4 - expected.grad).norm() / expected.grad.norm()))
    return max(errors)


@pytest.mark.parametrize("length", [4, 8, 11])
def test_averaged_gradients_are_those_of_one_device_wherever_the_parameter_is(ranks: Ranks, length: int) -> None:
    assert max(ranks(4).run(gradient_rule_error, length)) <= 1e-12
