"""How long an attention layer takes under each schedule, predicted from bytes and operations: `predict_schedules`.

Symbols as in `layout.latency`, and g the time of one projection's matrix product, t that of one projection's message.
A layer's compute is the same under all schedules; what differs is how much of the messages it hides, and the copies.

- ``"serial"``: nothing is hidden, and the side that holds all heads copies each message.
- ``"overlap"``: as the next, with n = 1 and with serial's copies. Nothing is computed in slices.
- ``"sliced"``: a message leaves in n pieces, as many as ranks, where the transport pushes them one by one, and whole
  where it does not (n = 1). Work that makes pieces and sending them overlap as in any pipeline of two stages. It ends
  after the slower one, and after the first piece of the one or the last of the other.

  - Forward: three products make three messages; attention, piece by piece, makes that of the output. Fewer queries at
    a time fill the processors less.
  - Backward: the output's product makes one message, and the gradient of its weight hides what is left of it. The
    value's gradients are sent alone, since norms wait for them. The others are sent beside the products that follow.

It is a prediction for machines on which nobody has measured, such as 8 GPUs or slower links, and a first guess where
somebody will. Matrix products are taken to be as fast in slices as whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lightning_videoscale.parallel.layout.latency import Layer, Layout, predict
from lightning_videoscale.parallel.layout.machines import Machine
from lightning_videoscale.parallel.schedules import ScheduleName

_HALF = 2  # bytes
_OF_FORWARD = 4 / 14  # of attention's operations
_COPIES, _COPIES_SLICED = 8, 5  # of all heads' numbers: four messages both ways; and those that nothing spares
_MORE = (
    6  # exchanges than "serial", in both directions: query, key and value go one by one, and sums of norms with them
)
_OF_GROUP = 7  # of tokens with weights of their own: three there and back, and the gradient of their output


def predict_schedules(
    layer: Layer,
    layout: Layout,
    machine: Machine,
    *,
    kv_heads: int | None = None,
    groups: int = 1,
    is_projected: bool = True,
    by_pieces: bool = False,
    between_nodes: bool = False,
) -> Mapping[ScheduleName, float]:
    """Returns the seconds of an attention layer, forward and backward, by schedule.

    Args:
        layer: What is computed; ``in_block`` is not read, as what follows attention is the same in all.
        layout: By which ranks.
        machine: How fast.
        kv_heads: Of keys and values; as many as of queries if left out.
        groups: Of tokens with the same projections; those of another group, such as text, are sent in other messages.
        is_projected: Whether the layer projects its output, too.
        by_pieces: Whether the transport sends the pieces of a message one by one.
        between_nodes: Whether a Ulysses group is on several nodes, so that its messages go by the network.
    """
    machine = replace(machine, link=machine.network) if between_nodes else machine
    alone = replace(layer, in_block=False)
    whole = predict(alone, layout, machine)
    few = (kv_heads or layer.heads) / layer.heads
    rows = layer.batch * math.ceil(layer.tokens / (layout.ulysses * layout.ring))  # of this rank
    numbers = rows * layer.heads * layer.head_dim
    product = 2 * rows * (layer.heads * layer.head_dim) ** 2 / machine.matmul
    leaves = (layout.ulysses - 1) / layout.ulysses * numbers * _HALF / machine.link
    pieces = layout.ulysses if by_pieces else 1
    output = product if is_projected else 0.0
    by_slices, by_product = (
        _exposed(product, output, leaves, few, each, whole.attention * _OF_FORWARD) for each in (pieces, 1)
    )
    device = whole.projections - 3 * (product - output) + whole.attention + whole.ring
    moved = 2 * _HALF * numbers * (2 + 2 * few) / 4 / machine.memory  # read and written by one copy, on average
    slices = layout.ulysses if layout.ring == 1 else 1
    sliced = device + by_slices + _COPIES_SLICED * moved + _OF_FORWARD * _idle_in_slices(alone, layout, machine, slices)
    overlap = device + by_product + _COPIES * moved
    serial = device + 2 * leaves * (2 + 2 * few) + 4 * machine.message + _COPIES * moved
    more = _MORE + (groups - 1) * _OF_GROUP
    messages, host = (4 + more) * machine.message, whole.host + more * machine.alone.exchange
    return {
        "serial": max(serial, whole.host),
        "overlap": max(overlap + messages, host),
        "sliced": max(sliced + messages, host),
    }


def _exposed(product: float, output: float, sent: float, few: float, pieces: int, attention: float) -> float:
    """What is not hidden of messages that leave in so many pieces, in seconds."""
    qkv, messages = product * (1 + 2 * few), sent * (1 + 2 * few)
    forward = _pipeline(qkv, messages, 3 * pieces) + _pipeline(attention, sent, pieces)
    of_output = max(0.0, _pipeline(output, sent, pieces) - output)
    value = sent * few
    key = max(0.0, sent * few - product * few)
    query = max(0.0, sent * (few + 1) - 3 * product * few - key)
    return forward + of_output + value + key + query


def _pipeline(work: float, sent: float, pieces: int) -> float:
    """Seconds that messages, sent piece by piece as work makes them, add to that work."""
    return max(work + sent / pieces, work / pieces + sent) - work


def _idle_in_slices(layer: Layer, layout: Layout, machine: Machine, slices: int) -> float:
    """By how much attention is slower if it is computed for a part of the queries at a time."""
    part = predict(replace(layer, tokens=math.ceil(layer.tokens / slices)), layout, machine).attention
    whole = predict(layer, layout, machine).attention
    return max(0.0, slices**2 * part - whole)  # a part of the queries attends to all keys, not to a part of them
