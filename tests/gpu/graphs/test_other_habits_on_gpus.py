"""Habits of users that a graph cannot repeat stay eager, with the same numbers; what it can, it repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from tests.gpu.graphs.training import SHAPES, both, draw, graphed, wan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_algorithms"),
]
STEPS = 6


class Adapter(nn.Module):
    """LoRA of a Linear that another module owns: its forward is put in the place of the Linear's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.forward_of_linear = linear.forward
        self.down = nn.Linear(linear.in_features, 4, bias=False, device="cuda")
        self.up = nn.Linear(4, linear.out_features, bias=False, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.forward_of_linear(x) + self.up(self.down(x))
        return out


def test_adapters_that_another_module_owns_train(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for by_graphs in (False, True):
        network = wan(fused=False).requires_grad_(False)
        torch.manual_seed(1)
        adapters = nn.ModuleList([Adapter(block.ffn.net[2]) for block in network.blocks])
        for block, adapter in zip(network.blocks, adapters, strict=True):
            block.ffn.net[2].forward = adapter.forward
        runs = graphed(network) if by_graphs else None
        optimizer, losses = torch.optim.AdamW(adapters.parameters(), lr=1e-2), []
        for number in range(STEPS):
            x, t, text = draw(SHAPES[0], number)
            loss = (network(x, t, text, return_dict=False)[0] - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        found.append(losses)
        assert runs is None or runs.counts["replayed"] == 0
    assert found[0] == found[1]
    assert "none of its modules owns" in capsys.readouterr().out


def offload(network: Any) -> None:
    block = network.blocks[3]
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return original(*args, **kwargs)

    block.forward = forward


def test_activations_that_wait_on_the_host() -> None:
    eager, other, runs = both(offload)
    for number in range(STEPS):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 0


def test_gradients_of_some_parameters_and_then_of_all_are_an_error() -> None:
    """As for a weight between two losses, by how they move the last layer."""
    _, other, runs = both()
    for number in range(4):
        other.step(number, SHAPES[0])
    loss = other.loss(9, SHAPES[0])
    torch.autograd.grad(loss, [other.network.proj_out.weight], retain_graph=True)  # type: ignore[list-item, union-attr]
    with pytest.raises(RuntimeError, match="only some gradients"):
        loss.backward()
    assert runs.counts["replayed"] == 3


def test_passes_on_two_streams() -> None:
    network = wan()
    runs = graphed(network)
    inputs = [draw(SHAPES[0], number) for number in range(12)]
    with torch.no_grad():
        expected = [network(*each).sample for each in inputs]
        streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
        torch.cuda.synchronize()
        for number, each in enumerate(inputs):
            with torch.cuda.stream(streams[number % 2]):
                found.append(network(*each).sample)
        torch.cuda.synchronize()
    assert all(map(torch.equal, expected, found))
    assert runs.counts["replayed"] == 2 * len(inputs) - 2
