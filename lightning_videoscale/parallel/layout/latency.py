"""How long a layer takes, forward and backward, on the slowest rank of a layout: `predict`.

B samples of S tokens, H heads of D numbers, W = H · D; U ranks in a Ulysses group, R groups in a ring, bfloat16. A rank
holds s = S / (U · R) tokens, and while it attends, q = U · s tokens of h = ⌈H / U⌉ heads.

- Projections: 24 · B · s · W² operations of four linear layers, and in a block those of the feed-forward layer.
- Exchange: query, key, value and output go over the link once forward and once backward, in four messages of
  (U - 1) · B · s · h · D numbers of each. The side that holds all heads copies them.
- Attention: 14 · B · q² · h · D operations for each of R blocks of keys. B · h · ⌈q / 128⌉ tiles go to all processors
  in waves, of which the last is partly empty.
- Ring: what of the hops attention does not hide, by how much attention is slower beside them, the sums over blocks.
- Host: launches of the layer, of exchanges and of steps.

In forward a block of keys and values (bfloat16) is sent while attention works on the block before it. In backward its
gradient (float32) follows one step behind, and the last one is waited for. Device and host work at the same time: the
slower of them is the time of the layer.

What it leaves out: grouped queries, ranks of unequal speed, and Ulysses groups over several nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_videoscale.parallel.layout.machines import Machine

_TILE = 128  # queries, as cuDNN's and flash-attn's kernels have them on Hopper
_FORWARD, _BACKWARD = 4, 10  # operations of attention for each pair of tokens and channel
_HALF, _SINGLE = 2, 4  # bytes
_MERGE, _ADD = 18, 30  # bytes read and written for each number of a block: outputs in forward, gradients in backward
_ENDS = 26  # likewise once: the message of the first block, and the casts of what comes out


@dataclass(frozen=True)
class Layer:
    """What is computed.

    Attributes:
        heads: H.
        head_dim: D.
        tokens: S, of all ranks together.
        batch: B.
        in_block: Whether it is a transformer block in training, with a feed-forward layer of 4 · W; else an attention
            layer alone, with its projections.
    """

    heads: int
    head_dim: int
    tokens: int
    batch: int = 1
    in_block: bool = True


class Layout(NamedTuple):
    """How the ranks that share a sequence divide.

    Attributes:
        ulysses: Ranks of a Ulysses group.
        ring: Groups of a ring.
    """

    ulysses: int
    ring: int

    def __str__(self) -> str:
        """Such as "ulysses 4 x ring 2"."""
        return f"ulysses {self.ulysses}" + (f" x ring {self.ring}" if self.ring > 1 else "")


class LayerTime(NamedTuple):
    """Seconds, forward and backward, of the parts above.

    Attributes:
        projections: Of the device, like all but the last.
        exchange: Likewise.
        attention: Likewise.
        ring: Likewise.
        host: Of the host.
    """

    projections: float
    exchange: float
    attention: float
    ring: float
    host: float

    @property
    def device(self) -> float:
        """What the device works."""
        return self.projections + self.exchange + self.attention + self.ring

    @property
    def total(self) -> float:
        """How long the layer takes."""
        return max(self.device, self.host)


def predict(layer: Layer, layout: Layout, machine: Machine, devices_per_node: int | None = None) -> LayerTime:
    """Returns how long a layer takes.

    Args:
        layer: What is computed.
        layout: By which ranks.
        machine: How fast.
        devices_per_node: Devices that the fast links join, a Ulysses group among them; None: all. A ring over more of
            them goes by the network.

    Raises:
        ValueError: If a rank would have no head.
    """
    if layout.ulysses > layer.heads:
        raise ValueError(f"{layer.heads} heads are too few for {layout}: every rank needs at least one.")
    node = devices_per_node or layout.ulysses * layout.ring
    tokens = layer.batch * math.ceil(layer.tokens / (layout.ulysses * layout.ring))
    width = layer.heads * layer.head_dim
    linears = (24 + 48 * layer.in_block) * tokens * width**2
    rows = _rows(layer, layout)
    block = rows * math.ceil(layer.heads / layout.ulysses) * layer.head_dim  # numbers of q, and of a block's keys
    attention = _attention(layer, layout, machine)
    host = machine.block if layer.in_block else machine.alone
    return LayerTime(
        projections=linears / machine.matmul,
        exchange=_exchange(tokens * layer.head_dim, layer.heads, layout.ulysses, machine),
        attention=layout.ring * attention,
        ring=_ring(attention, block, layout, machine, node) if layout.ring > 1 else 0.0,
        host=host.layer + 4 * host.exchange * (layout.ulysses > 1) + host.step * layout.ring * (layout.ring > 1),
    )


def _rows(layer: Layer, layout: Layout) -> int:
    """Tokens of all samples over which a rank attends."""
    return layer.batch * math.ceil(layer.tokens / layout.ring)


def _attention(layer: Layer, layout: Layout, machine: Machine) -> float:
    """Of one block of keys."""
    heads, queries = math.ceil(layer.heads / layout.ulysses), math.ceil(layer.tokens / layout.ring)
    tiles = layer.batch * heads * math.ceil(queries / _TILE)
    waves = math.ceil(tiles / machine.processors)
    of_tile = (_FORWARD + _BACKWARD) * _TILE * queries * layer.head_dim * machine.processors / machine.attention
    return waves * of_tile


def _exchange(numbers: int, heads: int, ulysses: int, machine: Machine) -> float:
    """Of all four messages; ``numbers`` are those of one head on this rank."""
    if ulysses == 1:
        return 0.0
    sent = (ulysses - 1) * 8 * numbers * math.ceil(heads / ulysses) * _HALF / machine.link
    return 4 * machine.message + sent + 8 * numbers * heads * 2 * _HALF / machine.memory


def _ring(attention: float, block: int, layout: Layout, machine: Machine, node: int) -> float:
    """What a ring adds to the attention of its steps, of which one takes ``attention``."""
    speed = machine.link if layout.ulysses * layout.ring <= node else machine.network

    def hop(numbers: int, size: int) -> float:
        return machine.message + numbers * size / speed

    keys, gradient = hop(2 * block, _HALF), hop(2 * block, _SINGLE)
    forward = attention * _FORWARD / (_FORWARD + _BACKWARD)
    backward = attention - forward
    slower = 1 + machine.contention
    beside = (layout.ring - 1) * max(forward * slower, keys) + forward
    beside += max(backward * slower, keys) + (layout.ring - 2) * max(backward * slower, keys + gradient)
    beside += max(backward * slower, gradient) + gradient
    sums = (_MERGE * (layout.ring - 1) + _ADD * layout.ring + _ENDS) * block / machine.memory
    return beside + sums - layout.ring * attention
