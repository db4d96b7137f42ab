"""Where a strategy waits for other ranks, and where sequence-parallel ranks exchange.

What DDP, FSDP2 and ZeRO reduce last is no call here: it runs between the last gradient and the end of
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lightning_videoscale.compat.deepspeed import zero_waits
from lightning_videoscale.compat.patching import Method
from lightning_videoscale.compat.torch.data_parallel import buffer_broadcasts, gathers_and_reductions
from lightning_videoscale.timing.step_times import Phase


class TimedCall(NamedTuple):
    """A method of one object, and the phase that it is."""

    owner: Any
    name: str
    phase: Phase


def synchronizing_calls(strategy: Any) -> Iterator[TimedCall]:
    """Yields the methods in which a strategy that is set up waits or exchanges.

    Raises:
        MissingNameError: If an installed framework has none of the methods known here.
    """
    methods: list[Method] = []
    if isinstance(strategy.model, DistributedDataParallel):
        methods += buffer_broadcasts(strategy.model)
    methods += gathers_and_reductions(strategy.lightning_module)
    if hasattr(strategy, "deepspeed_engine"):
        methods += zero_waits(strategy.deepspeed_engine.optimizer)
    yield from (TimedCall(*method, "wait") for method in methods)
    transport = getattr(strategy, "transport", None)
    if transport is not None:
        yield from (TimedCall(transport, name, "exchange") for name in ("exchange", "wait", "all_gather"))
