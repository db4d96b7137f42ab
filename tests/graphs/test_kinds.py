"""Which calls share graphs, and when these are dropped. A GPU's part, capture and replay, is left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.graphs import GraphedNetwork, GraphOptions, graphed_network
from lightning_videoscale.graphs.calls import NetworkCall
from lightning_videoscale.graphs.capture_together import Captured
from lightning_videoscale.graphs.kinds import Kinds
from lightning_videoscale.graphs.snapshot import Snapshot

CPU = torch.device("cpu")
TAKES: dict[Any, int] = {}
"""What a GPU would: GiB that graphs of so many samples take, and all bytes so far, under "now"."""


class WithoutGPU(GraphedNetwork):
    """Computes what it would replay."""

    def _inspected(self, kind: Any, call: NetworkCall, context: Any, args: Any, kwargs: Any) -> Any:
        kind.seen, kind.objection = Snapshot(self._network, CPU), getattr(self._network, "objection", None)
        return self._eagerly("eager", args, kwargs)

    def _capture(self, kind: Any, call: NetworkCall, *_: Any) -> None:
        kind.captured = object()
        TAKES["now"] += 2**30 * TAKES.get(call.tensors[0].shape[0], 0)  # by samples
        self._relied_on[self._state] = kind.seen

    def _replayed(self, kind: Any, call: NetworkCall, context: Any) -> Any:
        self.counts["replayed"] += 1
        return self._forward(*call.leaves)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(network: nn.Module, args: tuple[Tensor, ...], _: Any) -> NetworkCall:
        return NetworkCall(args[0].shape, list(args), None, list(args))

    monkeypatch.setattr(graphed_network, "read_call", read)
    TAKES.clear()
    TAKES["now"] = 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: TAKES["now"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Network:
    """A linear layer by graphs, its log, and where its messages lie."""

    def __init__(self, *, move_together: bool = True, alone: bool = False) -> None:
        self.layer, self.place = nn.Linear(2, 2), 0
        forward, options = self.layer.forward, GraphOptions(True)
        self.log: list[str] = []
        places = lambda: self.place  # noqa: E731
        # As of two ranks, of which the other says the same, or what it is told to.
        self.asked: list[Any] = []
        self.peer: Callable[[Any], Any] = lambda mine: mine
        gather = None if alone else self._gather
        self.runs = WithoutGPU(
            self.layer, forward, [], options, gather, lambda: 0, places, move_together, self.log.append
        )

    def _gather(self, mine: Any) -> list[Any]:
        self.asked.append(mine)
        return [mine, self.peer(mine)]

    def call(self, times: int = 1, samples: int = 1) -> None:
        for _ in range(times):
            self.runs(torch.ones(samples, 2))

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


@pytest.mark.parametrize("alone", [True, False])
def test_what_stood_against_a_graph_may_go(alone: bool) -> None:
    network = Network(alone=alone)
    network.layer.objection = "it has a hook"  # type: ignore[assignment]
    network.call(63)
    assert network.runs.counts["replayed"] == 0
    network.layer.objection = None  # type: ignore[assignment]
    network.call(2 * 64)
    assert network.runs.counts["replayed"] > 50


# -- memory: of 80 GiB, 4 are allowed --------------------------------------------------------------------------------


def test_those_of_calls_that_come_no_more_make_room() -> None:
    network = Network()
    TAKES.update({1: 3, 2: 1, 3: 1})
    network.call(4, samples=1)
    network.call(200, samples=2)
    network.call(4, samples=3)  # 5 GiB
    assert [line for line in network.log if "dropped" in line] == [
        "CUDA graphs of Linear are dropped: they take 5.0 GiB, and graphs_max_memory=0.05 allows 4.0 GiB. "
        "Those of calls that come again are captured anew."
    ]
    replayed = network.runs.counts["replayed"]
    for samples in (2, 3):
        network.call(4, samples=samples)
    assert network.runs.memory.bytes == 2 * 2**30
    assert network.runs.counts["replayed"] > replayed


def test_before_captures_have_paid_what_comes_new_stays_eager() -> None:
    network = Network()
    TAKES.update({1: 3, 2: 2, 3: 0})
    network.call(4, samples=1)
    network.call(4, samples=2)
    assert network.drops == 0
    assert "Linear runs without CUDA graphs: CUDA graphs of its calls are too many or too large" in network.log[-1]
    replayed = network.runs.counts["replayed"]
    network.call(samples=1)
    network.call(4, samples=3)  # which lie where those of others do
    assert network.runs.counts["replayed"] == replayed + 1 + 2


def test_what_alone_takes_too_much_is_captured_once() -> None:
    network = Network()
    TAKES.update({1: 6, 2: 1})
    network.call(200, samples=1)
    network.call(200, samples=2)
    assert network.runs.counts["captured"] == 2 and network.runs.memory.bytes == 2**30
    assert network.runs.counts["replayed"] == 200 - 2


def test_a_capture_that_fails_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Any, kind: Any, *_: Any) -> None:
        TAKES["now"] += 9 * 2**30
        raise torch.OutOfMemoryError("no more")

    network = Network()
    with monkeypatch.context() as patch:
        patch.setattr(WithoutGPU, "_capture", breaks)
        network.call(4, samples=1)
    network.call(4, samples=2)
    assert network.runs.memory.bytes == 0
    assert network.runs.counts["replayed"] == 2


def test_a_rank_whose_memory_is_exceeded_has_all_drop_their_graphs() -> None:
    network = Network()
    network.call(200)

    def peer(mine: Any) -> Any:
        return mine._replace(excess="they take 9.0 GiB") if isinstance(mine, Captured) else mine

    network.peer = peer
    network.call(3, samples=2)
    assert any("dropped: they take 9.0 GiB" in line for line in network.log)


def test_of_very_many_kinds_those_that_came_once_are_forgotten() -> None:
    kinds = Kinds()
    often = kinds.find("often")
    often.calls = 2
    for number in range(2000):
        kinds.find(number).calls += 1
    assert kinds.find("often") is often
    assert len(list(kinds)) < 1000


def test_kinds_share_what_was_seen_of_the_network_until_it_changes() -> None:
    network, kinds = nn.Linear(2, 2), Kinds()
    first, second, third = (kinds.find(name) for name in "abc")
    for kind in (first, second):
        kinds.note(kind, "state", Snapshot(network, torch.device("cpu")))
    network.weight = nn.Parameter(torch.ones(2, 2))
    kinds.note(third, "state", Snapshot(network, torch.device("cpu")))
    assert first.seen is second.seen and third.seen is not first.seen
