"""Train video diffusion transformers at scale with PyTorch Lightning.

Importing the package registers its strategies with Lightning (`Trainer(strategy="ulysses_ddp")`). Everything else is
imported when it is first asked for: sequence parallelism and kernels serve plain PyTorch, which needs neither the data
room nor the callbacks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_videoscale import injection, kernels, parallel, strategies
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    register_strategies,
)

if TYPE_CHECKING:
    from lightning_videoscale import callbacks, cost, data, metrics
    from lightning_videoscale.cost import BucketBudget
    from lightning_videoscale.data import VideoDataModule, benchmark_shapes

__all__ = [
    "BucketBudget",
    "SequenceParallelDDPStrategy",
    "SequenceParallelDeepSpeedStrategy",
    "SequenceParallelFSDP2Strategy",
    "VideoDataModule",
    "benchmark_shapes",
    "callbacks",
    "cost",
    "data",
    "inject_fused_kernels",
    "injection",
    "kernels",
    "metrics",
    "parallel",
    "strategies",
]

_LAZY = {
    "BucketBudget": "cost",
    "VideoDataModule": "data",
    "benchmark_shapes": "data",
    "callbacks": "callbacks",
    "cost": "cost",
    "data": "data",
    "metrics": "metrics",
}
"""Public names whose room is imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"{__name__}.{_LAZY[name]}")
    return room if name == _LAZY[name] else getattr(room, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
