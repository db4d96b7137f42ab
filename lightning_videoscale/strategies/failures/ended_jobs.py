"""A script that catches what a fit raised and fits again: the processes that Lightning had started have ended."""

from __future__ import annotations

import torch.distributed as dist

from lightning_videoscale.compat.torch.distributed import store_of

_KEY = "lightning_videoscale/ended"


def note_end(exception: BaseException) -> None:
    """Keeps for later runs of this process that its peers end because of an error."""
    if dist.is_initialized():
        store_of(dist.group.WORLD).set(_KEY, f"{type(exception).__name__}: {exception}")


def refuse_to_go_on() -> None:
    """Raises a ``RuntimeError`` if peers have ended because of an error: the next collective would break."""
    store = store_of(dist.group.WORLD)
    if store.check([_KEY]):
        raise RuntimeError(
            f"An earlier run of this process ended with {store.get(_KEY).decode()}, and with it the processes that "
            "Lightning had started. Start the script again; under torchrun, ranks that all catch an error can go on."
        )
