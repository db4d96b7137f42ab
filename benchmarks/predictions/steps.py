"""How long a training step of a video transformer takes under a layout: what is counted, and what was measured.

W channels, F of the feed-forward layer, L layers, s tokens of a rank, T text tokens, P parameters. Beside what
`lightning_videoscale.parallel.layout.predict` counts of self-attention, a layer has

- linear layers: 6 · s · (2 · W² + 2 · W · F) operations for cross-attention and feed-forward, and 6 · T · 2 · W² for
  the text's keys and values, which every rank computes;
- cross-attention: 14 · s · T · W operations;
- norms, gates and rotations: `rows` seconds for each token and channel, from ``kernels/wan_step-h200.json``.

A step adds ``per_parameter`` · P (optimizer, casts of weights) and ``per_number`` · L · s · W (what else autocast and
hooks do). These two are fitted to steps on one GPU; a step on several uses them as they are.

This is a step that trains all weights and keeps its activations. `Work` says how much of each part another one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from lightning_videoscale.parallel.layout import Layer, Layout, Machine, predict

FORWARD_AND_BACKWARD = 6  # operations of a linear layer for each token and weight
ATTENTION = 14  # operations of attention for each pair of tokens and channel, as `predict` counts them
TEXT = 512


@dataclass(frozen=True)
class Transformer:
    """What is trained.

    Attributes:
        name: For tables.
        heads: Of 128 numbers each.
        ffn: F.
        layers: L.
    """

    name: str
    heads: int
    ffn: int
    layers: int

    @property
    def width(self) -> int:
        """W."""
        return 128 * self.heads

    @property
    def parameters(self) -> int:
        """P, of the layers' matrices; embeddings are a few percent more."""
        return self.layers * (8 * self.width**2 + 2 * self.width * self.ffn)


WAN_1_3B = Transformer("Wan-1.3B", 12, 8960, 30)
WAN_14B = Transformer("Wan-14B", 40, 13824, 40)
WAN_14B_8 = Transformer("Wan-14B, 8 layers", 40, 13824, 8)


class Rest(NamedTuple):
    """What is measured and not counted, in seconds.

    Attributes:
        rows: For each token and channel of a layer.
        per_parameter: For each parameter, once a step.
        per_number: For each token and channel of a layer, beside `rows`.
    """

    rows: float
    per_parameter: float = 0.0
    per_number: float = 0.0


class Work(NamedTuple):
    """How much of each part a step does, over that of one that trains all weights and keeps its activations.

    Attributes:
        linears: Linear layers: forward, gradients of inputs and gradients of weights are a third each.
        attention: Of the video and of the text; its forward is 4 of 14 parts.
        exchange: Between the ranks of a sequence: half of it in forward.
        rows: Norms, gates, rotations, and what else is counted for each token and channel.
        host: Launches.
        parameters: What is counted for each parameter.
    """

    linears: float = 1.0
    attention: float = 1.0
    exchange: float = 1.0
    rows: float = 1.0
    host: float = 1.0
    parameters: float = 1.0


class StepTime(NamedTuple):
    """Seconds.

    Attributes:
        device: What the device works; a step by CUDA graphs.
        host: What the host takes to launch it eagerly.
    """

    device: float
    host: float

    @property
    def eager(self) -> float:
        """The slower of the two."""
        return max(self)


def step(
    model: Transformer,
    tokens: int,
    layout: Layout,
    machine: Machine,
    rest: Rest,
    node: int | None = None,
    work: Work = Work(),  # noqa: B008  (immutable)
) -> StepTime:
    """Returns the time of a step in which the ranks of a layout share one clip of so many tokens."""
    s = -(-tokens // (layout.ulysses * layout.ring))
    attention = predict(Layer(model.heads, 128, tokens, in_block=False), layout, machine, node)
    in_block = predict(Layer(model.heads, 128, tokens), layout, machine, node)
    numbers = s * model.width
    weights = 2 * model.width**2 + 2 * model.width * model.ffn
    linears = FORWARD_AND_BACKWARD * (s * weights + TEXT * 2 * model.width**2) / machine.matmul
    cross = ATTENTION * numbers * TEXT / machine.attention
    layer = (
        work.linears * (attention.projections + linears)
        + work.attention * (attention.attention + attention.ring + cross)
        + work.exchange * attention.exchange
        + work.rows * (rest.rows + rest.per_number) * numbers
    )
    once = work.parameters * rest.per_parameter * model.parameters
    return StepTime(model.layers * layer + once, work.host * model.layers * in_block.host)


def fit(model: Transformer, measured: Sequence[tuple[int, float]], machine: Machine, rows: float) -> Rest:
    """Fits the two constants to the seconds of steps of some tokens on one GPU, by least relative squares."""
    counted = [step(model, tokens, Layout(1, 1), machine, Rest(rows)).device for tokens, _ in measured]
    terms = np.array([[model.parameters, model.layers * tokens * model.width] for tokens, _ in measured], float)
    seconds = np.array([seconds for _, seconds in measured])
    found, _ = nnls(terms / seconds[:, None], 1 - np.array(counted) / seconds)
    return Rest(rows, *map(float, found))
