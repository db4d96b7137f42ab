"""What a network that ranks call together refuses at its entry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_videoscale.strategies.failures.network_calls import NetworkCalls


def test_tracing_is_refused_with_what_asks_for_it() -> None:
    network, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    calls = NetworkCalls(0, dict, patience=1.0)
    stop = calls.count(network, "transformer", [0, 1])
    with pytest.raises(RuntimeError, match=r"transformer.*log_graph=True"):
        torch.jit.trace(network, inputs)
    assert not calls.counts
    network(inputs)
    assert calls.counts == {"transformer with gradients": 1}
    stop()
    torch.jit.trace(network, inputs)
