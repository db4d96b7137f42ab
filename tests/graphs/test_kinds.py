"""Which calls share graphs, and when these are dropped. A GPU's part, capture and replay, is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.graphs import GraphedNetwork, GraphOptions, graphed_network
from lightning_videoscale.graphs.calls import NetworkCall
from lightning_videoscale.graphs.snapshot import Snapshot


class WithoutGPU(GraphedNetwork):
    """Computes what it would replay."""

    def _inspected(self, kind: Any, call: NetworkCall, context: Any, args: Any, kwargs: Any) -> Any:
        kind.seen = Snapshot(self._network)
        return self._eagerly("eager", args, kwargs)

    def _too_large(self, *_: Any) -> None:
        return None

    def _capture(self, kind: Any, *_: Any) -> None:
        kind.captured = object()
        self._relied_on[self._state] = kind.seen

    def _replayed(self, kind: Any, call: NetworkCall, context: Any) -> Any:
        self.counts["replayed"] += 1
        return self._forward(*call.leaves)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(network: nn.Module, args: tuple[Tensor, ...], _: Any) -> NetworkCall:
        return NetworkCall(args[0].shape, list(args), None, list(args))

    monkeypatch.setattr(graphed_network, "read_call", read)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Network:
    """A linear layer by graphs, its log, and where its messages lie."""

    def __init__(self, *, move_together: bool = True) -> None:
        self.layer, self.place = nn.Linear(2, 2), 0
        forward, options = self.layer.forward, GraphOptions(True)
        self.log: list[str] = []
        places = lambda: self.place  # noqa: E731
        # As of two ranks, of which the other says the same, or what it is told to.
        self.asked: list[Any] = []
        self.peer: Callable[[Any], Any] = lambda mine: mine
        self.runs = WithoutGPU(
            self.layer, forward, [], options, self._gather, lambda: 0, places, move_together, self.log.append
        )

    def _gather(self, mine: Any) -> list[Any]:
        self.asked.append(mine)
        return [mine, self.peer(mine)]

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            self.runs(torch.ones(1, 2))

    @property
    def drops(self) -> int:
        return sum("are dropped" in line for line in self.log)


def test_parameters_that_train_in_turns_have_graphs_of_their_own() -> None:
    network = Network()
    for turn in range(12):  # as of a discriminator
        network.layer.requires_grad_(turn % 2 == 0)
        network.call()
    assert (network.drops, network.runs.counts["captured"]) == (0, 2)
    assert network.runs.counts["replayed"] == 12 - 2 * 2


def test_what_changes_in_one_state_is_noticed_in_the_other() -> None:
    network = Network()
    network.call(4)
    network.layer.requires_grad_(False)
    network.call(4)
    network.layer.scale = 2.0  # type: ignore[assignment]
    network.layer.requires_grad_(True)
    replayed = network.runs.counts["replayed"]
    network.call()
    assert network.drops == 1
    assert network.runs.counts["replayed"] == replayed


@pytest.mark.parametrize("together", [True, False])
def test_ranks_agree_in_the_same_calls_wherever_messages_come_to_lie(together: bool) -> None:
    network, peer = Network(move_together=together), Network(move_together=together)
    for rank in (network, peer):
        rank.call(4)
    network.place = 1  # of one Ulysses group alone, if they do not move together
    if together:
        peer.place = 1
    for rank in (network, peer):
        rank.call(6)
    assert network.drops == 1
    assert len(network.asked) == len(peer.asked)


def test_why_another_rank_stays_eager_is_said_once() -> None:
    network = Network()
    network.peer = lambda mine: mine._replace(is_ready=False, objection="it draws", dropped="a hook was added")
    network.call(2 * 64)
    assert sum("rank 1 of its group says: it draws" in line for line in network.log) == 1
    assert any("dropped on rank 1 of its group: a hook was added" in line for line in network.log)
    assert network.runs.counts["eager"] == 2 * 64
