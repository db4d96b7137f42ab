"""Which layout is taken: `choose_layout`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_videoscale.parallel.layout.latency import Layer, LayerTime, Layout, predict
from lightning_videoscale.parallel.layout.machines import Machine

DEFAULT_TOKENS = 32_760
"""Tokens of a clip where nothing tells its length: 81 frames of 480 x 832 in Wan."""


@dataclass(frozen=True)
class LayoutChoice:
    """What was chosen, and from what.

    Attributes:
        layout: What was chosen.
        heads: Of the layer.
        times: Of the layouts that can run, those of the longest clip, with the largest Ulysses group first.
        seconds: Of each, of all clips together.
        longest: Tokens of the longest clip.
        machine: Whose speeds were taken.
        ring_objection: Why rings were left out, if they were.
    """

    layout: Layout
    heads: int
    times: Mapping[Layout, LayerTime]
    seconds: Mapping[Layout, float]
    longest: int
    machine: Machine
    ring_objection: str | None = None

    @property
    def plainest(self) -> Layout:
        """The one with the largest Ulysses group; all ranks where there are heads for them."""
        return next(iter(self.times))

    def speed(self, layout: Layout) -> float:
        """Returns how fast a layout is, over the largest Ulysses group."""
        return self.seconds[self.plainest] / self.seconds[layout]

    def describe(self) -> str:
        """Such as "12 heads on 8 ranks: ulysses 4 x ring 2, predicted 1.18 x ulysses 8 (…)"."""
        line = f"{self.heads} heads on {self.layout.ulysses * self.layout.ring} ranks: {self.layout}"
        others = [layout for layout in self.seconds if layout != self.plainest]
        if self.layout != self.plainest:
            line += f", predicted {self.speed(self.layout):.2f} x {self.plainest}"
        elif math.isinf(self.machine.margin):
            return f"{line} (the speeds of {self.machine.name} are unknown)."
        elif others:
            best = max(others, key=self.speed)
            too_little = ", too little to count" if self.speed(best) > 1 else ""
            line += f"; {best} is predicted {self.speed(best):.2f} x that{too_little}"
        elif self.ring_objection is not None:
            line += f"; no ring, as {self.ring_objection}"
        notes = f"clips of up to {self.longest} tokens; speeds of {self.machine.name}: {self.machine.source}"
        time = self.times[self.layout]
        if time.host > time.device:
            notes += "; the host's launches take longer than the device's work"
        return f"{line} ({notes})."


def layouts(ranks: int, heads: int, devices_per_node: int | None = None) -> list[Layout]:
    """Returns all ways to divide ``ranks`` in which every rank has a head, the largest Ulysses group first.

    Ulysses groups that would span nodes are left out.
    """
    sizes = [size for size in range(min(ranks, heads), 0, -1) if ranks % size == 0]
    return [Layout(size, ranks // size) for size in sizes if devices_per_node is None or devices_per_node % size == 0]


def choose_layout(
    ranks: int,
    heads: int,
    head_dim: int,
    machine: Machine,
    lengths: Mapping[int, int] | None = None,
    *,
    in_block: bool = True,
    most_ulysses: int | None = None,
    devices_per_node: int | None = None,
    ring_objection: str | None = None,
) -> LayoutChoice:
    """Chooses how ranks that share a sequence divide into ulysses × ring.

    It is the largest Ulysses group among the layouts that are slower than the fastest by no more than the machine's
    margin: a tie is for Ulysses, which has fewer messages, and rounds no more than one device.

    Args:
        ranks: Ranks that share a sequence.
        heads: Of attention; where it differs between layers, of that which costs most.
        head_dim: Numbers in a head.
        machine: Whose speeds count.
        lengths: How many clips there are of how many tokens. Short ones are taken to come in batches as long as the
            longest. None: one of `DEFAULT_TOKENS`.
        in_block: See `Layer`.
        most_ulysses: The largest Ulysses group that all layers can run; None: as many ranks as heads.
        devices_per_node: See `predict`.
        ring_objection: Why no ring may run here; None if it may.

    Raises:
        ValueError: If there are fewer heads than ranks and no ring may run.
    """
    lengths = lengths or {DEFAULT_TOKENS: 1}
    most = heads if most_ulysses is None else min(heads, most_ulysses)
    found = [layout for layout in layouts(ranks, most, devices_per_node) if ring_objection is None or layout.ring == 1]
    if not found:
        raise ValueError(
            f"{most} heads cannot be spread over {ranks} ranks without a ring, and no ring may run: {ring_objection}. "
            f"Let at most {most} ranks share a sequence (sp_size)."
        )
    longest = max(lengths)

    def time(layout: Layout, tokens: int) -> LayerTime:
        layer = Layer(heads, head_dim, tokens, max(1, longest // tokens), in_block)
        return predict(layer, layout, machine, devices_per_node)

    times = {layout: time(layout, longest) for layout in found}
    seconds = {
        layout: sum(count / max(1, longest // tokens) * time(layout, tokens).total for tokens, count in lengths.items())
        for layout in found
    }
    worst = min(seconds.values()) * (1 + machine.margin)
    chosen = next(layout for layout in found if seconds[layout] <= worst)
    return LayoutChoice(chosen, heads, times, seconds, longest, machine, ring_objection)
