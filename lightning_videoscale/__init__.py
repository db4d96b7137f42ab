"""Train video diffusion transformers at scale with PyTorch Lightning.

Importing the package makes its strategies known to Lightning (`Trainer(strategy="ulysses_ddp")`), at once or as soon as
Lightning is imported. Everything else is imported when it is first asked for: sequence parallelism and kernels serve
plain PyTorch, and ``videoscale --help`` needs not even that.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

if TYPE_CHECKING:
    from lightning_videoscale import callbacks, cost, data, injection, kernels, metrics, parallel, strategies
    from lightning_videoscale.cost import BucketBudget, TimeBudget
    from lightning_videoscale.data import VideoDataModule, benchmark_shapes
    from lightning_videoscale.injection import inject_fused_kernels
    from lightning_videoscale.strategies import (
        SequenceParallelDDPStrategy,
        SequenceParallelDeepSpeedStrategy,
        SequenceParallelFSDP2Strategy,
    )

__all__ = [
    "BucketBudget",
    "SequenceParallelDDPStrategy",
    "SequenceParallelDeepSpeedStrategy",
    "SequenceParallelFSDP2Strategy",
    "TimeBudget",
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

_HOMES = {
    "BucketBudget": "cost",
    "SequenceParallelDDPStrategy": "strategies",
    "SequenceParallelDeepSpeedStrategy": "strategies",
    "SequenceParallelFSDP2Strategy": "strategies",
    "TimeBudget": "cost",
    "VideoDataModule": "data",
    "benchmark_shapes": "data",
    "inject_fused_kernels": "injection",
}
"""The rooms of public names that are none themselves."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"{__name__}.{_HOMES.get(name, name)}")
    return getattr(room, name) if name in _HOMES else room


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_NEEDED = (f"{__name__}.compat.lightning", f"{__name__}.trained_weights")
"""What imports Lightning itself and is needed by the strategies: where it comes first, they wait for its end."""


@when_imported(_NEEDED[1])
@when_imported(_NEEDED[0])
@when_imported("lightning.pytorch")  # and all of it: our strategies derive from Lightning's
def _register(imported: ModuleType) -> None:
    if imported.__name__ in _NEEDED or not any(name in sys.modules for name in _NEEDED):
        import_module(f"{__name__}.strategies")  # which registers them
