"""Process groups, functional collectives, symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from lightning_videoscale.compat.torch import TORCH

# -- process groups ----------------------------------------------------------------------------------------------------


def process_groups() -> list[dist.ProcessGroup]:
    """Returns this rank's process groups; torch lists them nowhere in public."""
    world = TORCH.get("torch.distributed.distributed_c10d", "_world")
    return list(TORCH.get(world, "pg_names"))


def count_collectives(group: dist.ProcessGroup) -> int:
    """Returns how many collectives this rank has begun in a group, which only the group counts."""
    return int(TORCH.get(group, "_get_sequence_number_for_group")())


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns how long a collective of a group may wait, of its backends the shortest; it can be set in public only."""
    backend = TORCH.get(group, "_get_backend")
    timeouts = (backend(device).options._timeout for device in TORCH.get(group, "_device_types"))
    return min(timeouts, default=timedelta.max)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets how long a collective of a group may wait; in public that is said when the group is made."""
    TORCH.get("torch.distributed.distributed_c10d", "_set_pg_timeout")(timeout, group)


def store_of(group: dist.ProcessGroup | None) -> Any:
    """Returns the store that a group was set up with, for its ranks to exchange a few numbers from host to host."""
    return TORCH.get("torch.distributed.distributed_c10d", "_get_process_group_store")(group)


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Makes a group that has no backend known by a name, by which symmetric memory looks it up."""
    TORCH.get("torch._C._distributed_c10d", "_register_process_group")(name, group)


def unregister_group(name: str) -> None:
    """Takes back `register_group`."""
    TORCH.get("torch._C._distributed_c10d", "_unregister_process_group")(name)


_AT_ONCE = AllToAllOptions()
_AT_ONCE.asyncOp = False


def run_all_to_all(
    received: Tensor, message: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
) -> None:
    """``dist.all_to_all_single`` without its look at the arguments, which takes the host time in every layer.

    Args:
        received: To be filled, 1-D as ``message``, and of the same dtype.
        message: The pieces for all ranks in their order.
        receive: Elements from each rank; nothing if all pieces are equal.
        send: Elements to each rank; likewise.
        group: The ranks, of which this is one.
    """
    work = group.alltoall_base(received, message, receive, send, _AT_ONCE)
    if work is not None:
        work.wait()


# -- functional collectives, which `torch.compile` traces --------------------------------------------------------------

_all_to_all_single = TORCH.function("torch.distributed._functional_collectives", "all_to_all_single")
_wait_tensor = TORCH.function("torch.distributed._functional_collectives", "wait_tensor")


def traceable_all_to_all(message: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    """Starts an ``all_to_all_single`` that ``torch.compile`` can trace, as it cannot the public one with uneven pieces.

    Args:
        message: (n,), the pieces for all ranks in their order.
        receive: Elements from each rank.
        send: Elements to each rank.
        group: The ranks.

    Returns:
        What arrives, for `traceable_wait`.
    """
    received: Tensor = _all_to_all_single(message, list(receive), list(send), group)
    return received


def traceable_wait(pending: Tensor) -> Tensor:
    """Waits for what `traceable_all_to_all` returned, on GPUs on the current stream."""
    finished: Tensor = _wait_tensor(pending)
    return finished


# -- symmetric memory --------------------------------------------------------------------------------------------------


def empty_symmetric(nbytes: int, device: torch.device) -> Tensor:
    """Allocates memory that peers can map; (nbytes,) uint8.

    Not ``symmetric_memory.empty``: from torch 2.12 on it takes from a pool, which keeps what a larger one replaces.
    """
    memory = TORCH.get("torch._C._distributed_c10d", "_SymmetricMemory")
    storage: Tensor = TORCH.get(memory, "empty_strided_p2p")((nbytes,), (1,), torch.uint8, device)
    return storage


def map_peers(storage: Tensor, group: str) -> Any:
    """Maps the peers' memory; collective over the group of this name.

    Returns:
        A handle that holds it, with ``get_buffer(rank, sizes, dtype)``.
    """
    return TORCH.get(TORCH.get("torch._C._distributed_c10d", "_SymmetricMemory"), "rendezvous")(storage, group)


def symmetric_backend(device: torch.device) -> str | None:
    """Returns what allocates symmetric memory on a device, None where it was not chosen yet."""
    backend: str | None = TORCH.get("torch.distributed._symmetric_memory", "get_backend")(device)
    return backend
