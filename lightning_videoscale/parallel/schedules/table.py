"""Which schedule runs a layer: what is chosen at a time, for each kind of layer.

`LayerShape`     a layer in one call
`ScheduleKey`    what calls share that one measurement stands for
`ScheduleTable`  what is chosen, as it stood at a time; a forward pass goes by one table, its recomputation by the same
`Schedules`      what layers ask
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import under_autocast
from lightning_videoscale.parallel.layout.latency import Layer, Layout
from lightning_videoscale.parallel.layout.machines import Machine
from lightning_videoscale.parallel.schedules import HIDING, ScheduleName, ScheduleSetting
from lightning_videoscale.parallel.schedules.prediction import predict_schedules

_WORTH = 1.01  # times as fast as serial, at least: less is within the spread of a measurement
_ALIKE = 0.25  # octaves of lengths and batch sizes, up to which one measurement stands for both


class LayerShape(NamedTuple):
    """A layer of attention in one call; equal on all ranks that share the sequence.

    Attributes:
        batch: Samples.
        tokens: Of the whole sequence.
        width: Channels of a token.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Numbers in a head.
        across_heads: Whether query and key are normalised over all heads.
        dtype: Such as "bfloat16", in which matrices are multiplied.
        apart: Tokens, of all, that have projections of their own, as text often has; 0 if all have the same.
        is_projected: Whether the layer projects its output, too.
        has_biases: Whether a projection has a bias, whose gradient is summed over tokens.
    """

    batch: int
    tokens: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    across_heads: bool
    dtype: str
    apart: int = 0
    is_projected: bool = True
    has_biases: bool = True

    @classmethod
    def of(
        cls,
        x: Tensor,
        tokens: int,
        heads: int,
        head_dim: int,
        *,
        across_heads: bool,
        apart: int = 0,
        is_projected: bool = True,
        has_biases: bool = True,
    ) -> LayerShape:
        """Returns that of a call with this rank's tokens x, (B, s, C), of ``tokens`` tokens in all.

        As many heads have keys as queries; the other numbers are the attributes.
        """
        dtype = torch.get_autocast_dtype(x.device.type) if under_autocast(x) else x.dtype
        name = str(dtype).removeprefix("torch.")
        numbers = x.shape[0], tokens, x.shape[2], heads, heads, head_dim
        return cls(*numbers, across_heads, name, apart, is_projected, has_biases)


class LayerPlacement(NamedTuple):
    """Where layers run: device, transport, ranks of a Ulysses group, such groups in a ring, hosts of a group."""

    device: str
    transport: str
    ulysses: int
    ring: int
    hosts: int


class ScheduleKey(NamedTuple):
    """A kind of layer at a place, as it is measured; of plain values, as it is written to a file.

    `LayerPlacement` and `LayerShape` have their meaning.
    """

    device: str
    transport: str
    ulysses: int
    ring: int
    hosts: int
    dtype: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    across_heads: bool
    is_projected: bool
    has_biases: bool
    batch: int
    tokens: int
    apart: int

    @classmethod
    def of(cls, shape: LayerShape, place: LayerPlacement) -> ScheduleKey:
        """Returns that of a layer at a place."""
        numbers, sizes = (shape.width, shape.heads, shape.kv_heads, shape.head_dim), (shape.batch, shape.tokens)
        kind = shape.across_heads, shape.is_projected, shape.has_biases
        return cls(*place, shape.dtype, *numbers, *kind, *sizes, shape.apart)

    def __str__(self) -> str:
        """Such as "bfloat16, 5120 channels, 40 heads of 128, batch 1, 32768 tokens over ulysses 4, collective"."""
        few = f" ({self.kv_heads} of keys)" if self.kv_heads != self.heads else ""
        norm = ", normalised over all heads" if self.across_heads else ""
        layer = f"{self.dtype}, {self.width} channels, {self.heads} heads of {self.head_dim}{few}{norm}"
        layer += "" if self.is_projected else ", output not projected"
        layer += "" if self.has_biases else ", no biases"
        apart = f" ({self.apart} with weights of their own)" if self.apart else ""
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        over = f"{Layout(self.ulysses, self.ring)}{hosts}, {self.transport}"
        return f"{layer}, batch {self.batch}, {self.tokens} tokens{apart} over {over}"

    def distance(self, other: ScheduleKey) -> float | None:
        """How far another key is away, in octaves of lengths and batch sizes; None where layers differ in kind."""
        if self[:-3] != other[:-3] or (self.apart == 0) != (other.apart == 0):
            return None
        return sum(abs(math.log2(mine / its)) for mine, its in zip(self[-3:], other[-3:], strict=True) if its)

    def is_like(self, other: ScheduleKey) -> bool:
        """Whether one measurement stands for both: they differ in kind in nothing, and hardly in size."""
        distance = self.distance(other)
        return distance is not None and distance <= _ALIKE

    def predict(self, machine: Machine) -> Mapping[ScheduleName, float]:
        """Returns the seconds by schedule, see `predict_schedules`."""
        layer = Layer(self.heads, self.head_dim, self.tokens, self.batch, in_block=False)
        return predict_schedules(
            layer,
            Layout(self.ulysses, self.ring),
            machine,
            kv_heads=self.kv_heads,
            groups=2 if self.apart else 1,
            is_projected=self.is_projected,
            by_pieces=self.transport == "symmetric",
            between_nodes=self.hosts > 1,
        )


def schedules_of(key: ScheduleKey) -> tuple[ScheduleName, ...]:
    """Returns the schedules that can run a kind of layer, "serial" first."""
    return ("serial", *HIDING) if key.kv_heads == key.heads else ("serial",)


def fastest(gains: Mapping[ScheduleName, float]) -> ScheduleName:
    """The schedule to run, by how many times as fast as "serial" each is: another one must gain 1 % at least."""
    names = [name for name in gains if gains[name] >= _WORTH]
    return max(names, key=lambda name: gains[name]) if names else "serial"


class ScheduleTable:
    """What is chosen for each kind of layer, as it stood at a time. It never changes.

    It is what was measured; where nothing was, what a checkpoint says that the run has chosen before; else what was
    measured at the nearest sizes, by as much more or less as the prediction of both differs; else what is predicted,
    if the prediction is of a gain that is worth it. Sizes close to each other may differ: a few heads fill the last
    wave of the processors with 16 384 tokens and half of it with 14 040, and slices have more last waves.

    Args:
        measured: How many times as fast as "serial" schedules are, of kinds of layers.
        before: What was chosen before a checkpoint, by the kind's description.
        machine: Whose speeds the prediction takes; None predicts nothing.
        objection: Why only "serial" can run, whatever the kind; None if others can.
    """

    def __init__(
        self,
        measured: Mapping[ScheduleKey, Mapping[ScheduleName, float]],
        before: Mapping[str, ScheduleName],
        machine: Machine | None,
        objection: str | None,
    ) -> None:
        self._measured, self._before, self._machine = dict(measured), dict(before), machine
        self.objection = objection
        self._known: dict[ScheduleKey, tuple[ScheduleName, str]] = {}

    def choose(self, key: ScheduleKey) -> ScheduleName:
        """Returns the schedule of a kind of layer."""
        return self.explain(key)[0]

    def explain(self, key: ScheduleKey) -> tuple[ScheduleName, str]:
        """Returns the schedule of a kind of layer, and what it goes by."""
        if key not in self._known:
            self._known[key] = self._decide(key)
        return self._known[key]

    def _decide(self, key: ScheduleKey) -> tuple[ScheduleName, str]:
        if self.objection is not None:
            return "serial", self.objection
        if len(schedules_of(key)) == 1:
            return "serial", "no other can run it"
        if key in self._measured:
            return fastest(self._measured[key]), "measured"
        if str(key) in self._before:
            return self._before[str(key)], "as before the checkpoint, not measured"
        distances = {known: key.distance(known) for known in self._measured}
        if near := [(distance, known) for known, distance in distances.items() if distance is not None]:
            nearest = min(near)[1]
            name = fastest(self._carried_over(nearest, key))
            return name, f"measured of {nearest.batch} x {nearest.tokens} tokens, the nearest"
        return self._predict(key)

    def _carried_over(self, known: ScheduleKey, key: ScheduleKey) -> Mapping[ScheduleName, float]:
        """The gains measured at other sizes, times by how much those predicted differ."""
        gains = self._measured[known]
        if self._machine is None or math.isinf(self._machine.margin):
            return gains
        there, here = known.predict(self._machine), key.predict(self._machine)
        return {
            name: gain * (here["serial"] / here[name]) / (there["serial"] / there[name]) for name, gain in gains.items()
        }

    def _predict(self, key: ScheduleKey) -> tuple[ScheduleName, str]:
        if self._machine is None or math.isinf(self._machine.margin):
            return "serial", "neither measured nor predicted"
        seconds = key.predict(self._machine)
        best = min(seconds, key=lambda name: seconds[name])
        gain = seconds["serial"] / seconds[best]
        name = best if gain >= 1 + self._machine.margin else "serial"
        return name, f"predicted: {best} {gain:.2f} x serial on {self._machine.name}; not measured"


class Schedules(Protocol):
    """What layers ask for their schedule."""

    schedule: ScheduleSetting
    """What was asked for."""
    table: ScheduleTable
    """What is chosen now."""

    def choose(self, shape: LayerShape, table: ScheduleTable) -> ScheduleName:
        """Returns the schedule of a layer by a table, and notes that it was asked for."""

    def watch(self, objection: Callable[[], str | None]) -> Callable[[], None]:
        """Asks from now on what stands against other schedules than "serial"; returns the undo."""
