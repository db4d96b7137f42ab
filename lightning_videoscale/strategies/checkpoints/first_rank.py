"""What rank 0 does for all ranks while they save, and how all of them learn whether it failed: `on_first`."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_videoscale.ranks import gather_over_ranks, rank_in_world
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError


def on_first(function: Callable[[], None], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Calls a function on rank 0, which ``what`` names for messages, while the others wait; collective.

    Raises:
        CheckpointError: On all ranks, if the function raised.
    """
    error, cause = "", None
    if rank_in_world() == 0:
        try:
            function()
        except Exception as raised:
            error, cause = f"{type(raised).__name__}: {raised}", raised
    error = gather_over_ranks(error, group)[0]
    if error:
        raise CheckpointError(f"Rank 0 could not {what} ({error}).") from cause
