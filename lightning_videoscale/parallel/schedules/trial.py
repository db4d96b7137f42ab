"""How a layer is measured, under each schedule.

`Alone`          a transport that sends nothing: to see that a rank can run a layer before its peers rely on it
`time_in_turns`  seconds of forward and backward, on all ranks at the same time
`RecordsCalls`   has calls repeated by CUDA graphs, as in steps that run by those
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.transport import ColumnExchange, CopiedColumns, Exchange, Join

RunPasses = Callable[[int], object]
"""Makes so many passes, and returns when the device is done with them."""

_SHORTEST_TURN = 0.1  # seconds: the host queues ahead as in training, and waits for the device but once in a turn
_MOST_PASSES, _FEWEST_ROUNDS, _MOST_ROUNDS = 16, 3, 9


class RecordsCalls(Protocol):
    """Records what calls do on a device; see `graphs.Recorder`."""

    def repeat(self, call: Callable[[], object]) -> Callable[[], object]:
        """Returns what does it again; nothing of it is done meanwhile, nor communicated."""


class Alone:
    """A transport of a rank without peers: nothing is sent, and zeros arrive. See `Transport` for the contract."""

    name = "alone"
    traceable = True
    memory_bytes, places = 0, ()
    failure = None

    def carrier(self, axis: Axis) -> str:
        """Its own name."""
        return self.name

    def reset(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Returns zeros."""
        return message.new_zeros(sum(receive))

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Exchange:
        """As `open`."""
        return self.open(message, send, receive, axis)

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Exchange:
        """Returns what takes pieces and drops them."""
        return _Unsent(message.split(list(send)), message.new_zeros(sum(receive)).split(list(receive)))

    def begin(self, like: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Exchange:
        """As `open`."""
        return self.open(like.new_empty(sum(send)), send, receive, axis)

    def begin_columns(
        self, columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis
    ) -> ColumnExchange:
        """As `open`."""
        return CopiedColumns(self, columns, lengths, widths, axis)

    def wait(self, pending: Any, join: Join | None = None) -> Tensor:
        """Returns what has arrived at once."""
        return torch.cat(pending.received) if join is None else join(pending.received)

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """Returns zeros."""
        return x.new_zeros(sum(lengths), *x.shape[1:])


@dataclass(frozen=True)
class _Unsent:
    pieces: Sequence[Tensor]
    received: Sequence[Tensor]

    def send(self, *peers: int) -> None:
        """Sends nothing."""


def time_in_turns(
    runs: Mapping[ScheduleName, RunPasses],
    seconds: float,
    clock: Callable[[], float],
    slowest: Callable[[Sequence[float]], list[float]],
) -> dict[ScheduleName, list[float]] | None:
    """Times forward and backward of each schedule, one after the other, round by round; collective over all ranks.

    How many rounds there are follows from times that all ranks know, so that all make as many.

    Args:
        runs: By schedule.
        seconds: In which it is to end.
        clock: The time in seconds, of this rank.
        slowest: Returns the largest of all ranks' numbers, one by one.

    Returns:
        The seconds of a pass in each round, of the slowest rank; None if there is no time for three rounds.
    """

    def time(name: ScheduleName, passes: int) -> float:
        begin = clock()
        runs[name](passes)
        return (clock() - begin) / passes

    names = list(runs)
    first = slowest([time(name, 1) for name in names])
    of_round = max(sum(first), 1e-9)
    fit = int((seconds - of_round) / of_round)  # rounds of one pass
    if fit < _FEWEST_ROUNDS:
        return None
    passes = max(1, min(_MOST_PASSES, fit // _MOST_ROUNDS, math.ceil(_SHORTEST_TURN / max(min(first), 1e-9))))
    rounds = min(_MOST_ROUNDS, fit // passes)
    turns: dict[ScheduleName, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            turns[name].append(time(name, passes))
    flat = slowest([turn for name in names for turn in turns[name]])
    return {name: flat[place * rounds : (place + 1) * rounds] for place, name in enumerate(names)}
