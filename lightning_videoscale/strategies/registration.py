"""The names by which a Trainer selects our strategies, and what Lightning asks before it makes one."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_videoscale.compat.lightning import find_last_checkpoints_by_url, leave_precision_to
from lightning_videoscale.strategies.ddp import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.deepspeed import SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.fsdp2 import SequenceParallelFSDP2Strategy
from lightning_videoscale.strategies.lightning_messages import refuse_fabric
from lightning_videoscale.strategies.precision import FSDP2_PRECISIONS, ZERO_PRECISIONS, check_precision

_LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ulysses": ("Ulysses sequence parallelism, in rings where these are predicted to be faster", {}),
    "usp": ("Ulysses in rings of two", {"ring_size": 2}),
}
_DDP: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {
    (): ("", {}),
    ("find_unused_parameters_true",): (", for parameters that not every loss uses", {"find_unused_parameters": True}),
    ("notebook",): (", forked from a notebook", {"start_method": "fork"}),
}


def register_strategies() -> None:
    """Makes the names known to Lightning."""
    leave_precision_to(_checks_precision)
    find_last_checkpoints_by_url()
    for prefix, (split, sizes) in _LAYOUTS.items():
        over = f"over the devices of each node with {split}"
        for variant, (purpose, arguments) in _DDP.items():
            name = "_".join((prefix, "ddp", *variant))
            _register(name, SequenceParallelDDPStrategy, f"DDP {over}{purpose}", sizes | arguments)
        _register("_".join((prefix, "fsdp2")), SequenceParallelFSDP2Strategy, f"FSDP2 {over}", sizes)
    for stage in (1, 2, 3):
        _register(
            f"ulysses_deepspeed_stage_{stage}",
            SequenceParallelDeepSpeedStrategy,
            f"DeepSpeed ZeRO-{stage} over the devices of each node with {_LAYOUTS['ulysses'][0]}",
            {"stage": stage},
        )


def _register(name: str, strategy: type, description: str, arguments: dict[str, Any]) -> None:
    StrategyRegistry.register(name, strategy, description=description, **arguments)
    FABRIC_REGISTRY.register(name, partial(refuse_fabric, name), description="For lightning.pytorch.Trainer only")


def _checks_precision(strategy: Any, precision: str) -> bool:
    """Checks the precision of our strategies, of which Lightning's own check knows the parents only."""
    if isinstance(strategy, SequenceParallelFSDP2Strategy):
        check_precision(precision, type(strategy).__name__, FSDP2_PRECISIONS)
    elif isinstance(strategy, SequenceParallelDeepSpeedStrategy):
        check_precision(precision, type(strategy).__name__, ZERO_PRECISIONS)
    return isinstance(strategy, SequenceParallelFSDP2Strategy)
