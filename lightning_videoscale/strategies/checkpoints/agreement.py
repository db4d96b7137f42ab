"""What the ranks tell each other while they save, in a process group of their choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_videoscale.strategies.checkpoints.errors import CheckpointError


def all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's value; a barrier too."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_first(function: Callable[[], None], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Calls a function on rank 0, which ``what`` names for messages, while the others wait; collective.

    Raises:
        CheckpointError: On all ranks, if the function raised.
    """
    error, cause = "", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            function()
        except Exception as raised:
            error, cause = f"{type(raised).__name__}: {raised}", raised
    error = all_ranks(error, group)[0]
    if error:
        raise CheckpointError(f"Rank 0 could not {what} ({error}).") from cause
