"""What all ranks of the job know, of what each has for itself. Without ranks, what this process has."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def rank_in_world() -> int:
    """This rank among all of the job; 0 without ranks."""
    return dist.get_rank() if _is_joined() else 0


def gather_over_world(mine: _T) -> list[_T]:
    """Returns what all ranks have, in their order; collective over them."""
    if not _is_joined():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def of_first_rank(mine: _T) -> _T:
    """Returns what rank 0 has; collective over all ranks."""
    if not _is_joined():
        return mine
    box: list[Any] = [mine]
    dist.broadcast_object_list(box)
    first: _T = box[0]
    return first


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
