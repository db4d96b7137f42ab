"""Speeds of GPUs, of the links between them and of their hosts, as `latency` needs them.

`Machine`        the constants of one kind of machine
`MACHINES`       those that are known here, by name
`machine_of`     the one of a device's name; defaults where none is known
`read_machine`   constants of your own, from a file

The H200's were fitted to the 30 layers of ``benchmarks/results/parallel/attention_layer-h200x2.json`` and ``…x4.json``
(cuDNN's attention, NCCL, torch 2.11). All but two are predicted within 5.5 %, those two within 6.5 %.
``benchmarks/parallel/layouts.py`` gives the same constants from these files, and fits those of any machine.

What the launches of a block take the host was measured on such a machine in training steps of Wan-1.3B, not compiled:
7.8 ms forward and backward, 11 ms with Ulysses, about 14.5 ms with 2 × 2 ranks and 16 ms with a ring of four. The
H100's constants are the H200's but for its memory, by the data sheets. The network's are guesses.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Host:
    """Seconds that the host needs to launch a layer, forward and backward.

    Attributes:
        layer: All but the following.
        exchange: An all-to-all of Ulysses, of which a layer has four.
        step: A step of a ring, forward and backward; it has as many as ranks.
    """

    layer: float
    exchange: float
    step: float


@dataclass(frozen=True)
class Machine:
    """What decides how long a layer takes. Bytes and operations are those of one device.

    Attributes:
        name: Such as "h200".
        source: Where the constants come from, for people.
        matmul: FLOP/s of the linear layers, bfloat16.
        attention: FLOP/s of attention, forward and backward, where its tiles fill all processors.
        processors: That work on tiles of attention at the same time.
        memory: Bytes/s read and written by copies that change the order, and by sums.
        link: Bytes/s that a device sends to others of its node, and receives at the same time.
        network: Bytes/s likewise to other nodes.
        message: Seconds until the first byte of a message is there.
        contention: By how much attention is slower while a message is under way.
        alone: What the host needs for an attention layer alone, as in a benchmark.
        block: What it needs for a transformer block in training, with hooks and casts.
        margin: Gains up to this much are not worth another layout than the largest Ulysses group; infinite where the
            other constants mean nothing.
    """

    name: str
    source: str
    matmul: float
    attention: float
    processors: int
    memory: float
    link: float
    network: float
    message: float
    contention: float
    alone: Host
    block: Host
    margin: float = 0.03


_IN_TRAINING = Host(layer=7.8e-3, exchange=0.8e-3, step=1.8e-3)

_H200 = Machine(
    name="h200",
    source="measured",
    matmul=6.44e14,
    attention=5.57e14,
    processors=132,
    memory=1.29e12,
    link=3.53e11,
    network=4.5e10,  # a link of 400 Gbit/s for each GPU, not measured
    message=1.8e-5,
    contention=0.03,
    alone=Host(layer=4.4e-4, exchange=1.2e-4, step=1.05e-3),
    block=_IN_TRAINING,
)

MACHINES = {
    "h200": _H200,
    "h100": replace(_H200, name="h100", source="the H200's, but for memory not measured", memory=0.7 * _H200.memory),
    "default": replace(
        _H200,
        name="default",
        source="defaults, not measured",
        matmul=2.2e14,
        attention=1.8e14,
        processors=108,
        memory=5e11,
        link=2e11,
        network=2.2e10,
        margin=0.1,
    ),
}
"""By name. "default" is for other GPUs: about an A100, and a gain must be larger to count."""

MACHINES["cpu"] = replace(MACHINES["default"], name="cpu", source="unknown", margin=math.inf)


def machine_of(device_name: str) -> Machine:
    """Returns the constants of a device by the name that its driver reports, such as "NVIDIA H200"; else defaults."""
    words = device_name.lower().replace("-", " ").split()
    return next((machine for name, machine in MACHINES.items() if name in words), MACHINES["default"])


def read_machine(name: str) -> Machine:
    """Returns a machine by its name, or from a file that ``benchmarks/parallel/layouts.py`` wrote.

    Args:
        name: One of `MACHINES`, or the path of such a file; of its ``"machine_constants"``, what is missing is as in
            the defaults.

    Raises:
        ValueError: If it is neither.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))["settings"]["machine_constants"]
        return _from_dict(given)
    except FileNotFoundError:
        raise ValueError(f"{name!r} is neither one of {[*MACHINES]} nor a file with constants.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} has no constants of a machine under settings.machine_constants: {error!r}."
        ) from error


def _from_dict(given: dict[str, Any]) -> Machine:
    unknown = set(given) - {field.name for field in fields(Machine)}
    if unknown:
        raise ValueError(f"nothing is known of {sorted(unknown)}")
    hosts: dict[str, Any] = {name: Host(**given[name]) for name in ("alone", "block") if name in given}
    machine = replace(MACHINES["default"], **{**given, **hosts})
    numbers = [getattr(machine, field.name) for field in fields(Machine)]
    numbers += [*asdict(machine.alone).values(), *asdict(machine.block).values()]
    if not all(number >= 0 for number in numbers if isinstance(number, int | float)):
        raise ValueError("a constant is negative")
    return machine
