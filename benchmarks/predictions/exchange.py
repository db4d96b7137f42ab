"""How long gradients and sharded parameters take between GPUs, and what of it a step shows.

P parameters in L layers; n nodes of 8 GPUs; a GPU sends ``link`` bytes a second inside its node and ``network`` to
other nodes, by an adapter of its own. Collectives are rings that use all adapters of a node, so that a node sends
8 · ``network``. A collective takes the slower of the two ways. DDP's, of 25 MiB each, follow each other closely, and
wait for 2 · log2(n) messages once.

- DDP: an all-reduce of gradients in float32, 2 · (N - 1) / N · 4 · P bytes, N = 8 · n.
- FSDP2 with a replica on each node: two gathers of parameters in bfloat16, 2 · 7 / 8 · 2 · P bytes, and a
  reduce-scatter of gradients in float32, 7 / 8 · 4 · P bytes, inside the node; then an all-reduce of each GPU's eighth
  across nodes, 2 · (n - 1) / n · 4 · P / 8 bytes.
- FSDP2 with one replica: the same gathers and reduce-scatter over all N, of each layer, by rings through all nodes:
  3 · L · (n - 1) messages more.

All of it may run beside the step's work, and nothing must: the truth lies between T / max(T, exchange) and
T / (T + exchange).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_videoscale.parallel.layout import Machine

GPUS = 8
_SINGLE, _HALF = 4, 2


class Exchange(NamedTuple):
    """Seconds of a step.

    Attributes:
        ddp: See above.
        fsdp2_replica_per_node: Likewise.
        fsdp2: Likewise.
    """

    ddp: float
    fsdp2_replica_per_node: float
    fsdp2: float


def exchange(parameters: int, layers: int, nodes: int, machine: Machine) -> Exchange:
    """Returns how long each takes."""
    ranks = GPUS * nodes
    begin = 2 * math.log2(nodes) * machine.message
    across = 2 * (nodes - 1) / nodes * _SINGLE * parameters / GPUS / machine.network
    return Exchange(
        ddp=averaged(parameters, ranks, machine) + begin,
        fsdp2_replica_per_node=sharded(parameters, parameters, GPUS, machine) + across + begin,
        fsdp2=sharded(parameters, parameters, ranks, machine) + 3 * layers * (nodes - 1) * machine.message,
    )


def averaged(trained: int, ranks: int, machine: Machine) -> float:
    """Seconds of DDP's all-reduce of so many gradients."""
    return _collective(2, _SINGLE * trained, ranks, machine)


def sharded(parameters: int, trained: int, ranks: int, machine: Machine) -> float:
    """Seconds of FSDP2's gathers of all parameters, and of the reduce-scatter of the gradients of some."""
    gathers = 2 * _collective(1, _HALF * parameters, ranks, machine)
    return gathers + _collective(1, _SINGLE * trained, ranks, machine)


def _collective(passes: float, nbytes: float, ranks: int, machine: Machine) -> float:
    """A ring over the ranks; ``passes`` is 2 for an all-reduce, 1 for a gather or a reduce-scatter."""
    sent = passes * (ranks - 1) / ranks * nbytes
    return max(sent / machine.link, sent / (GPUS * machine.network) if ranks > GPUS else 0.0)
