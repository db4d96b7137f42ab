"""Of a capture, what needs no GPU: whose gradients it has, and the parameters that stand in for the network's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.graphs.capture import fresh_parameters, refuse_other_leaves


def test_a_parameter_that_no_module_owns_is_refused() -> None:
    """As of adapters that another module holds and a changed forward calls."""
    own, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    out = checkpoint(lambda x: x * other, own * 2, use_reentrant=False)
    refuse_other_leaves([out], [own, other])
    with pytest.raises(RuntimeError, match="none of its modules owns"):
        refuse_other_leaves([out.sum()], [own])


class Tied(nn.Module):
    """Two layers with one weight; its forward looks at the parameters that stand in for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        before = dict(self.named_parameters(remove_duplicate=False))
        with fresh_parameters(self) as own:
            inside = dict(self.named_parameters(remove_duplicate=False))
            assert inside["first.weight"] is inside["second.weight"] is not before["first.weight"]
            for name, fresh in inside.items():
                assert own[fresh] is before[name] and fresh.data_ptr() == before[name].data_ptr()
            with pytest.raises(ZeroDivisionError), fresh_parameters(self):
                _ = 1 / 0
        assert all(x is before[name] for name, x in self.named_parameters(remove_duplicate=False))
        out: Tensor = self.second(self.first(x))
        return out


def test_parameters_come_back_also_where_plain_tensors_stand_in_for_them() -> None:
    network = Tied()
    before = dict(network.named_parameters())
    network(torch.ones(1, 3))
    functional_call(network, {"first.bias": torch.ones(3)}, torch.ones(1, 3))  # as for a teacher of other weights
    assert all(x is before[name] for name, x in network.named_parameters())
