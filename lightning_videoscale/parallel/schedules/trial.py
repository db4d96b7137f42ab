"""The layer that is measured: projections, exchange, attention and output projection, under each schedule.

`TrialLayer`     weights and inputs of a kind of layer, and what a model does with them
`Group`          the ranks that run it, and by what
`Alone`          a transport that sends nothing: to see that a rank can run a layer before its peers rely on it
`time_in_turns`  seconds of forward and backward, on all ranks at the same time

Shapes: B batch, s tokens of this rank, C channels, H heads, h heads of this rank, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.kernels import qk_norm_rope, qkv_linear
from lightning_videoscale.parallel.attention import attend_heads, sequence_parallel_attention
from lightning_videoscale.parallel.mesh import Axis, SequenceMesh
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.sliced_input import Norm, project_heads
from lightning_videoscale.parallel.schedules.sliced_output import attend_and_project, project_output
from lightning_videoscale.parallel.schedules.table import ScheduleKey, schedules_of
from lightning_videoscale.parallel.sharding import split_sizes
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads

Run = Callable[[int], object]
"""Makes so many passes, and returns when the device is done with them."""

_MOST_FLOPS = 1e14  # of attention in a pass, on one rank: some 0.2 s on an H200
_MOST_FLOPS_CPU = 1e9
_SHORTEST_TURN = 2e-2  # seconds
_MOST_PASSES, _FEWEST_ROUNDS, _MOST_ROUNDS = 16, 3, 9
_EPS = 1e-6


@dataclass(frozen=True)
class Group:
    """The ranks that share a sequence, and by what they compute and exchange.

    Attributes:
        mesh: Of the ranks.
        transport: Of the exchange.
        attention: What chooses the kernel of attention.
        device: Of this rank.
    """

    mesh: SequenceMesh
    transport: Transport
    attention: AttentionChoices
    device: torch.device


class TrialLayer:
    """Weights and inputs of a kind of layer.

    Args:
        key: The kind; a long sequence is shortened to one of which a pass takes tens of milliseconds.
        group: Who runs it.
    """

    def __init__(self, key: ScheduleKey, group: Group) -> None:
        self._key, self._group = key, group
        self._lengths = split_sizes(shortened(key, group.device), group.mesh.sp.size)
        generator, dtype = torch.Generator(group.device).manual_seed(0), getattr(torch, key.dtype)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(*shape, device=group.device, generator=generator) * scale
            return x.to(dtype).requires_grad_()

        inner, few = key.heads * key.head_dim, key.kv_heads * key.head_dim
        self._qkv = tuple(draw(rows, key.width, scale=key.width**-0.5) for rows in (inner, few, few))
        self._output = draw(key.width, inner, scale=inner**-0.5)
        self._norms = tuple(draw(rows) for rows in (inner, few)) if key.across_heads else ()
        angles = torch.rand(sum(self._lengths), key.head_dim // 2, device=group.device, generator=generator)
        self._tables = angles.cos(), angles.sin()
        # Last, since ranks may differ in how many tokens they have, and must not in their weights.
        self._x, dy = (draw(key.samples, self._lengths[group.mesh.sp.rank], key.width) for _ in range(2))
        self._dy = dy.detach()

    def runs(self) -> dict[ScheduleName, Callable[[Transport], Sequence[Tensor]]]:
        """Returns forward and backward by schedule; each returns the output and the gradients."""
        ways: dict[ScheduleName, Callable[[Transport], Tensor]] = {"serial": self._serial, "sliced": self._sliced}

        def passing(forward: Callable[[Transport], Tensor]) -> Callable[[Transport], Sequence[Tensor]]:
            return lambda transport: self._pass(forward, transport)

        return {name: passing(ways[name]) for name in schedules_of(self._key)}

    def _pass(self, forward: Callable[[Transport], Tensor], transport: Transport) -> Sequence[Tensor]:
        wanted = [self._x, *self._qkv, self._output, *self._norms]
        with torch.enable_grad(), torch.autocast(self._group.device.type, enabled=False):
            out = forward(transport)
            return out.detach(), *torch.autograd.grad(out, wanted, self._dy)

    def _serial(self, transport: Transport) -> Tensor:
        dim = self._key.head_dim
        projected = qkv_linear(self._x, (self._qkv[0], self._qkv[1], self._qkv[2]))
        query, key, value = (each.unflatten(-1, (-1, dim)) for each in projected)
        if self._norms:
            rank = self._group.mesh.sp.rank
            first = sum(self._lengths[:rank])
            cos, sin = (table[first : first + self._lengths[rank]] for table in self._tables)
            query, key = qk_norm_rope(query, key, *self._norms, eps=_EPS, rope=(cos, sin))
        out = sequence_parallel_attention(
            query,
            key,
            value,
            self._group.mesh,
            lengths=self._lengths,
            transport=transport,
            attention_backend=self._group.attention,
        )
        return F.linear(out.flatten(2), self._output)

    def _sliced(self, transport: Transport) -> Tensor:
        group, mesh, heads = self._group, self._group.mesh, self._key.heads
        first = mesh.ring.rank * mesh.ulysses.size
        lengths = self._lengths[first : first + mesh.ulysses.size]
        ulysses = Ulysses(mesh.ulysses, assign_heads(mesh.ulysses.rank, lengths, lengths, heads, heads), transport)
        norm = self._norm_across_heads(ulysses, sum(self._lengths[:first]), sum(lengths)) if self._norms else None
        parts = project_heads(self._x, [(weight, None) for weight in self._qkv], norm, ulysses, heads)
        qkv, scale, output = (parts.query, parts.key, parts.value), self._key.head_dim**-0.5, (self._output, None)
        if mesh.ring.size == 1:
            return attend_and_project(*qkv, output, ulysses, group.attention, scale)
        out = attend_heads(*qkv, mesh, self._lengths, ulysses.heads.repeats, transport, scale, group.attention)
        return project_output(out, output, ulysses)

    def _norm_across_heads(self, ulysses: Ulysses, first: int, tokens: int) -> Norm:
        mine, dim = ulysses.heads.out.heads[0][ulysses.axis.rank], self._key.head_dim
        weights = [weight[mine.start * dim : mine.stop * dim] for weight in self._norms]
        batch, wide = self._x.shape[0], torch.promote_types(self._x.dtype, torch.float32)
        of_group = (table[first : first + tokens].to(wide) for table in self._tables)
        tables = [table.repeat_interleave(batch, 0)[None, :, None] for table in of_group]
        across = NormAcrossHeads(self._key.heads * dim, _EPS, "fp32_once")
        return Norm(across, NormTensors(weights, tables))


def shortened(key: ScheduleKey, device: torch.device) -> int:
    """Returns how many tokens a trial has: as the kind, or so many that a pass is short; one for each rank at least."""
    flops = 14 * key.samples * key.length**2 * key.heads * key.head_dim / (key.ulysses * key.ring)
    most = _MOST_FLOPS if device.type == "cuda" else _MOST_FLOPS_CPU
    return max(int(key.length * min(1.0, (most / flops) ** 0.5)), key.ulysses * key.ring)


class Alone:
    """A transport of a rank without peers: nothing is sent, and zeros arrive. See `Transport` for the contract."""

    name = "alone"
    memory_bytes = 0
    failure = None

    def carrier(self, axis: Axis) -> str:
        """Its own name."""
        return self.name

    def close(self) -> None:
        """Does nothing."""

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Returns zeros."""
        return message.new_zeros(sum(receive))

    all_to_all = exchange

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> _Unsent:
        """Returns what takes pieces and drops them."""
        return _Unsent(message.new_zeros(sum(receive)))

    def wait(self, pending: Tensor | _Unsent) -> Tensor:
        """Returns what has arrived at once."""
        return pending.received if isinstance(pending, _Unsent) else pending

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """Returns zeros."""
        return x.new_zeros(sum(lengths), *x.shape[1:])


@dataclass(frozen=True)
class _Unsent:
    received: Tensor

    def send(self, *peers: int) -> None:
        """Sends nothing."""


def time_in_turns(
    runs: Mapping[ScheduleName, Run],
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
    passes = max(1, min(_MOST_PASSES, fit // _FEWEST_ROUNDS, math.ceil(_SHORTEST_TURN / max(min(first), 1e-9))))
    rounds = min(_MOST_ROUNDS, fit // passes)
    turns: dict[ScheduleName, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            turns[name].append(time(name, passes))
    flat = slowest([turn for name in names for turn in turns[name]])
    return {name: flat[place * rounds : (place + 1) * rounds] for place, name in enumerate(names)}
