"""What a rank publishes about itself, so that one that fails can be named.

`Process`        an operating system's process; whether it still runs can be asked from the same machine
`RankState`      where a rank is, how many collectives it has begun in each of its groups, which networks it has called
`late_members`   compares the states of ranks: who has not come to a collective that others have begun
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_videoscale.compat.python import ThreadStack
from lightning_videoscale.compat.torch.distributed import count_collectives, process_groups, timeout_of
from lightning_videoscale.parallel.mesh import is_in_background
from lightning_videoscale.strategies.failures.current_line import line_of


@dataclass(frozen=True)
class Process:
    """A process, not to be mistaken for a later one with the same number.

    Attributes:
        machine: Names the running operating system and the namespace in which the number counts.
        pid: Its number.
        started: When it started, in the operating system's units; empty where this cannot be known.
        host: The machine's name, for people: several machines may have the same.
    """

    machine: str
    pid: int
    started: str
    host: str

    @classmethod
    def current(cls) -> Process:
        """This process."""
        pid = os.getpid()
        status = _status(pid)
        if status is None:  # not Linux
            return cls("", pid, "", socket.gethostname())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(f"{boot} {os.readlink('/proc/self/ns/pid')}", pid, status[1], socket.gethostname())

    def has_ended(self, here: Process) -> bool:
        """Whether it has ended, as far as can be seen from the process ``here``; False on another machine."""
        if not self.started or self.machine != here.machine:
            return False
        status = _status(self.pid)
        return status is None or status[0] in "ZX" or status[1] != self.started


def _status(pid: int) -> tuple[str, str] | None:
    """Linux's state and start time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


@dataclass(frozen=True)
class RankState:
    """Where a rank is.

    Attributes:
        place: The loop and the batch.
        line: The line that its main thread executes, the innermost one that is not of an installed package.
        collectives: How many collectives it has begun in each of its groups, by the group's name.
        calls: How often it has entered each network that ranks call together, by the network's name.
        has_left: Whether its run of the Trainer has ended.
        time: When this was so, in seconds since the epoch.
    """

    place: str
    line: str
    collectives: dict[str, int]
    calls: dict[str, int]
    has_left: bool
    time: float

    @classmethod
    def current(
        cls, place: str, main: ThreadStack, collectives: dict[str, int], calls: dict[str, int], has_left: bool
    ) -> RankState:
        """The state of this rank now, whose main thread has that stack."""
        return cls(place, line_of(main), collectives, dict(calls), has_left, time.time())

    def dump(self) -> str:
        """As text, for `load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> RankState:
        """From what `dump` returned."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        age = time.time() - self.time
        return f"{self.place}, at {self.line}, heard of {max(age, 0.0):.0f} s ago"


def begun_collectives() -> dict[str, int]:
    """How many collectives this rank's main thread has begun in each of its process groups, by the group's name."""
    groups = [group for group in process_groups() if not is_in_background(group)]
    return {group.group_name: count_collectives(group) for group in groups}


def timeouts_of_groups() -> dict[str, timedelta]:
    """How long the collectives of each of this rank's process groups may wait, by the group's name."""
    return {group.group_name: timeout_of(group) for group in process_groups()}


def members_of(group_name: str) -> list[int]:
    """Global ranks of a process group of this rank."""
    group = next(group for group in process_groups() if group.group_name == group_name)
    return list(dist.get_process_group_ranks(group))


def late_members(rank: int, states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Which ranks have begun fewer collectives than ``rank`` in a group that they share, by the group's name."""
    late = {}
    for name, count in states[rank].collectives.items():
        ranks = [
            peer for peer in members_of(name) if peer in states and states[peer].collectives.get(name, count) < count
        ]
        if ranks:
            late[name] = ranks
    return late
