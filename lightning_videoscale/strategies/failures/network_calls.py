"""A split network is called by its ranks together: who is in it while the others went on without it?

A rank that samples alone, such as in a hook that runs on rank 0 only, waits in the network for ever, and its peers
wait elsewhere for it. So do ranks that call a sharded network more often than others, as in a rollout of drawn length.
Nobody has failed and each waits for another, so a timeout may well name the wrong one.

All ranks run one program. So a rank that has not entered a call yet is slow, however late it comes, as long as it has
begun no collective that comes after the entry. One that has begun such a collective has gone past the call. Each
rank notes therefore, when it enters a network, how many collectives it had begun in each group. Its failure detector
compares that with what its peers publish once it waits; nothing is exchanged for it in a step.

A rank may also wait in a call by a CUDA graph, whose messages no process group counts and no watchdog of NCCL sees.
There, too, it waits no longer for a peer than a collective would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from lightning_videoscale.compat.torch.autograd import is_tracing
from lightning_videoscale.strategies.failures.rank_state import RankState
from lightning_videoscale.undo import Undo

_SURE = 5.0  # s without any progress on both sides: threads of a user's own may begin collectives in any order
_SLOW = 20.0  # s after which a peer that may yet come is named
_SAMPLING = "without gradients"
_KEPT = 256  # entries: on GPUs, a rank's host goes through many calls before it has to wait

_ADVICE = (
    "All of ranks {ranks} must call this network together, and equally often: draw the length of a rollout from what "
    "all of them know, such as trainer.global_step. Sample on all of them (no `if rank == 0`, no rank_zero_only) and "
    "save the result on rank 0 alone, or sample with a network that is not split: build a second one outside of the "
    "LightningModule, since a copy is split too, and load the weights into it."
)


class _Entry(NamedTuple):
    """The beginning of one call."""

    name: str
    number: int
    begun: dict[str, int]
    peers: tuple[int, ...]


class NetworkCalls:
    """Counts how often this rank has entered the networks that it must call together with its peers.

    Args:
        rank: This rank.
        begun: Says how many collectives this rank has begun in each of its groups.
        patience: Seconds that a peer may stay away from a call in which this rank waits.

    Attributes:
        counts: By network, with and without gradients apart.
        peers: Other ranks that call one of the networks when this one does.
    """

    def __init__(self, rank: int, begun: Callable[[], dict[str, int]], patience: float) -> None:
        self.counts: dict[str, int] = {}
        self.peers: list[int] = []
        self._rank, self._begun, self._patience = rank, begun, patience
        self._entries: deque[_Entry] = deque(maxlen=_KEPT)
        self._since: dict[int, tuple[object, float]] = {}
        self._named: tuple[str, int] | None = None
        self._is_inside = False

    def count(self, network: nn.Module, name: str, ranks: Iterable[int]) -> Undo:
        """Counts a network's calls, before other hooks on it, which may wait for peers.

        Calls raise RuntimeError under ``torch.jit.trace``, which knows no process groups.

        Args:
            network: The network.
            name: Of it, the same on all ranks.
            ranks: Those that call it when this one does.

        Returns:
            A function that ends it.
        """
        peers = tuple(peer for peer in ranks if peer != self._rank)
        self.peers = sorted({*self.peers, *peers})

        def note_entry(*_: object) -> None:
            if is_tracing():
                raise RuntimeError(
                    f"torch.jit.trace cannot follow {name}, in which ranks wait for each other. If a logger draws the "
                    "graph, leave out its log_graph=True; else trace the model outside of the Trainer."
                )
            kind = f"{name} {'with' if torch.is_grad_enabled() else 'without'} gradients"
            number = self.counts.get(kind, 0) + 1
            self._entries.append(_Entry(kind, number, self._begun(), peers))
            self.counts[kind] = number
            self._is_inside = True

        def note_exit(*_: object) -> None:
            self._is_inside = False

        return Undo(
            network.register_forward_pre_hook(note_entry, prepend=True).remove,
            network.register_forward_hook(note_exit).remove,
        )

    def look(self, mine: RankState, read: Callable[[list[int]], Mapping[int, RankState]]) -> tuple[str, bool]:
        """Looks for peers that stay away from a call in which this rank waits.

        To be called every second or so; while this rank makes progress it does nothing.

        Args:
            mine: This rank's state now.
            read: Returns what other ranks have published.

        Returns:
            What to say, if anything, and whether to give up: the peers cannot come any more, or are
            too late.
        """
        waited = self._without_progress(self._rank, mine)
        if waited < 1.0 or not self.counts:
            return "", False
        states = read(self.peers)
        waits = {peer: self._without_progress(peer, state) for peer, state in states.items()}
        entry, gone = self._passed_by(states)
        if entry is not None and waited >= _SURE and min(waits[peer] for peer in gone) >= _SURE:
            return self._describe(entry, mine, {peer: states[peer] for peer in gone}, "have gone on without it"), True
        entry, late = self._awaited(states)
        if entry is None or gone:
            return "", False
        is_too_late = waited >= self._patience
        if is_too_late or (waited >= _SLOW and self._named != entry[:2]):
            self._named = entry[:2]
            return self._describe(entry, mine, late, f"have not come to it for {waited:.0f} s"), is_too_late
        return "", False

    def explain(self, mine: RankState, states: Mapping[int, RankState]) -> str:
        """Says what can be known at once, for a rank that fails now: where peers are, or at least where it is."""
        if not self._entries:
            return ""
        entry, gone = self._passed_by(states)
        if entry is not None:
            return self._describe(entry, mine, {peer: states[peer] for peer in gone}, "have gone on without it")
        last = self._entries[-1]
        if not self._is_inside or not last.name.endswith(_SAMPLING):
            return ""
        return (
            f"Rank {self._rank} was in call {last.number} of {last.name} ({mine}), which is "
            f"the cause unless ranks {list(last.peers)} were in it too. " + self._advice(last)
        )

    def _passed_by(self, states: Mapping[int, RankState]) -> tuple[_Entry | None, list[int]]:
        """The first call of this rank that peers have passed by, and these peers."""
        for entry in list(self._entries):
            behind = _not_in(entry, states)
            gone = [
                peer
                for peer, state in behind.items()
                if (state.has_left or any(state.collectives.get(group, 0) > n for group, n in entry.begun.items()))
                and not self._is_the_odd_one(entry, state)
            ]
            if gone:
                return entry, gone
        return None, []

    def _is_the_odd_one(self, entry: _Entry, state: RankState) -> bool:
        """Whether a peer samples while this rank trains: its own detector will say so, and name the right rank."""
        if entry.name.endswith(_SAMPLING):
            return False
        return any(count > self.counts.get(name, 0) for name, count in state.calls.items() if name.endswith(_SAMPLING))

    def _awaited(self, states: Mapping[int, RankState]) -> tuple[_Entry | None, dict[int, RankState]]:
        """The first call of this rank that peers have not come to, and these peers."""
        for entry in list(self._entries):
            late = _not_in(entry, states)
            if late:
                return entry, late
        return None, {}

    def _without_progress(self, rank: int, state: RankState) -> float:
        """Seconds since a rank was first seen where it is."""
        now, where = time.monotonic(), (state.calls, state.collectives)
        before = self._since.get(rank)
        if before is None or before[0] != where:
            self._since[rank] = before = where, now
        return now - before[1]

    def _describe(self, entry: _Entry, mine: RankState, peers: Mapping[int, RankState], what: str) -> str:
        elsewhere = ", ".join(f"rank {peer} ({state})" for peer, state in peers.items())
        return (
            f"Rank {self._rank} is in call {entry.number} of {entry.name} ({mine}), and ranks {list(peers)} {what}: "
            f"{elsewhere}. " + self._advice(entry)
        )

    def _advice(self, entry: _Entry) -> str:
        return _ADVICE.format(ranks=sorted([self._rank, *entry.peers]))


def _not_in(entry: _Entry, states: Mapping[int, RankState]) -> dict[int, RankState]:
    """The peers that have not entered a call yet."""
    calls = {peer: states[peer].calls.get(entry.name, 0) for peer in entry.peers if peer in states}
    return {peer: states[peer] for peer, number in calls.items() if number < entry.number}
