"""What ranks tell each other, any object. Without ranks, what this process has.

For values on the host, a few at a time: each is a collective that pickles.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def rank_in_world() -> int:
    """This rank among all of the job; 0 without ranks."""
    return dist.get_rank() if _is_joined(None) else 0


def gather_over_ranks(mine: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Returns what all ranks of a group, by default of the job, have, in their order; collective over them."""
    if not _is_joined(group):
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return everyone


def of_first_rank(mine: _T) -> _T:
    """Returns what rank 0 of the job has; collective over all ranks."""
    if not _is_joined(None):
        return mine
    box: list[Any] = [mine]
    dist.broadcast_object_list(box)
    first: _T = box[0]
    return first


def _is_joined(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
