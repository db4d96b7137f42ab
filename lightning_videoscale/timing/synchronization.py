"""Where a strategy waits for other ranks, and where sequence-parallel ranks exchange.

None of the frameworks offers hooks around these calls, so that they are named here, as of torch 2.11 to 2.13 and
DeepSpeed 0.19. What DDP, FSDP2 and ZeRO reduce last needs no name: it runs between the last gradient and the end of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_videoscale.timing.step_times import Phase


class Call(NamedTuple):
    """A method of one object, and the phase that it is."""

    owner: Any
    name: str
    phase: Phase


def synchronizing_calls(strategy: Any) -> Iterator[Call]:
    """Yields the methods in which a strategy that is set up waits or exchanges.

    Raises:
        RuntimeError: If the installed versions of the frameworks have none of the methods known here.
    """
    if isinstance(strategy.model, DistributedDataParallel):
        yield from _calls(strategy.model, "wait", "_sync_buffers")
    for group in _sharded_groups(strategy.lightning_module):
        yield from _calls(group, "wait", "pre_forward", "pre_backward", "post_backward")
    if hasattr(strategy, "deepspeed_engine"):
        yield from _zero_calls(strategy.deepspeed_engine.optimizer)
    transport = getattr(strategy, "transport", None)
    if transport is not None:
        yield from _calls(transport, "exchange", "exchange", "wait", "all_gather")


def _sharded_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters: what is gathered and reduced at a time."""
    # Modules that were sharded together share a state.
    states: list[Any] = [child._get_fsdp_state() for child in module.modules() if isinstance(child, FSDPModule)]
    for state in dict.fromkeys(states):
        group = getattr(state, "_fsdp_param_group", None)  # torch 2.13 may have several
        yield from getattr(state, "_fsdp_param_groups", [group] if group is not None else [])


def _zero_calls(optimizer: Any) -> Iterator[Call]:
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is not None:  # stage 3
        yield from _calls(offload.get_param_coordinator(), "wait", "fetch_sub_module")
        yield from _calls(optimizer, "wait", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")
    elif any(base.__name__ == "DeepSpeedZeroOptimizer" for base in type(optimizer).__mro__):  # stages 1 and 2
        yield from _calls(optimizer, "wait", "reduce_ipg_grads")
    # DeepSpeed's other optimizers reduce at the end of backward only.


def _calls(owner: Any, phase: Phase, *names: str) -> Iterator[Call]:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(
            f"The clock tells waiting from work at {names} of {type(owner).__qualname__}, but the version installed "
            f"has no {missing}. Install versions that constraints.txt names, or leave the callbacks that need it out."
        )
    yield from (Call(owner, name, phase) for name in names)
