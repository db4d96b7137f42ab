"""Groups of ranks by number, as the ops of compiled code name them: an op takes tensors and plain values only."""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.transport import Transport


class Group(Protocol):
    """Ranks that share sequences."""

    mesh: SequenceMesh
    transport: Transport


_groups: WeakValueDictionary[int, Group] = WeakValueDictionary()
"""As long as a model, or a graph for backward, holds them."""
_numbers = count()


def number(group: Group) -> int:
    """Returns the number under which ops find the group from now on; none is given twice."""
    new = next(_numbers)
    _groups[new] = group
    return new


def group_of(number: int) -> Group:
    """Returns the group of a number.

    Raises:
        RuntimeError: If nothing holds it any more.
    """
    if (group := _groups.get(number)) is None:
        raise RuntimeError(
            f"Compiled code exchanges over the group of number {number}, which is gone: keep what was split until its "
            "backward has run."
        )
    return group
