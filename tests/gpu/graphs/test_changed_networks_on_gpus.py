"""Graphs of a network that has changed since, or that was copied: never those of the network of before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn

from tests.gpu.graphs.training import SHAPES, both, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_algorithms"),
]


def move(network: Any) -> None:
    network.blocks[1].ffn.net[2].weight.data = network.blocks[1].ffn.net[2].weight.data * 2


def replace(network: Any) -> None:
    old = network.proj_out
    network.proj_out = nn.Linear(old.in_features, old.out_features).cuda()
    network.proj_out.load_state_dict({name: 3 * value for name, value in old.state_dict().items()})


def freeze_one(network: Any) -> None:
    network.blocks[0].attn1.to_q.weight.requires_grad_(False)
    network.blocks[0].attn1.to_q.weight.grad = None


def add_hook(network: Any) -> None:
    network.blocks[2].register_forward_hook(lambda _, __, output: output * 1.5)


def set_attribute(network: Any) -> None:
    network.blocks[3].norm2.eps = 0.5


def choose_backend(network: Any) -> None:
    network.set_attention_backend("_native_math")


def end_training(network: Any) -> None:
    network.blocks[1].eval()


@pytest.mark.parametrize(
    "change",
    [move, replace, freeze_one, add_hook, set_attribute, choose_backend, end_training],
    ids=lambda f: f.__name__,
)
def test_a_graph_is_never_stale(change: Callable[[Any], None]) -> None:
    eager, other, runs = both()
    for number in range(5):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    replayed = runs.counts["replayed"]
    assert replayed > 0
    for training in (eager, other):
        with attention_backend("native"):  # setting one sets it for all networks too, until the block ends
            change(training.network)
        training.optimizer = torch.optim.AdamW(training.network.parameters(), lr=1e-3)
    for number in range(5, 10):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["eager"] > 2


def test_a_graph_is_not_taken_for_valid_because_another_was_captured_since() -> None:
    eager, other, runs = both()
    for number in range(4):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    for training in (eager, other):
        set_attribute(training.network)
    for number in range(4, 12):
        shape = SHAPES[1] if number < 9 else SHAPES[0]
        assert eager.step(number, shape) == other.step(number, shape)
    assert runs.counts["captured"] >= 2


def test_a_network_that_changes_in_every_step_stays_eager(capsys: pytest.CaptureFixture[str]) -> None:
    eager, other, runs = both()
    for number in range(24):
        for training in (eager, other):
            training.network.blocks[0].weight = torch.ones(2, device="cuda")  # type: ignore[union-attr,index]
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] <= 8
    assert "has changed between calls" in capsys.readouterr().out


def test_a_copy_runs_eagerly_and_by_its_own_weights() -> None:
    _, other, runs = both()
    for number in range(4):
        other.step(number, SHAPES[0])
    average = copy.deepcopy(other.network)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    count = runs.counts.total()
    inputs = draw(SHAPES[0], 1)
    assert not torch.equal(average(*inputs).sample, other.network(*inputs).sample)
    assert runs.counts.total() == count + 1
