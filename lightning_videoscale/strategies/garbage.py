"""When a strategy lets Python collect garbage: seldom, and on all ranks at once."""

from __future__ import annotations

import gc
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.garbage import ShortCollections
from lightning_videoscale.strategies.parent import StrategyPart

_FIRST = 4
"""Before, a run still makes much of what it keeps, such as kernels and the states of optimizers."""


class CollectsTogether(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`.

    Left alone, a rank collects in the middle of a step, and all others wait for it. Here all ranks collect what they
    have after steps 4, 8, 16 and so on, and before validation. In between they look only at what is new. On a GPU they
    also collect before a run, as the model of an earlier one, in a cycle with its Trainer, may still have memory there.
    """

    _steps_of_run: int  # which `ChoosesByMeasuring` counts, behind this part

    def _init_collections(self) -> None:
        self._collections = ShortCollections()

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "cuda":
            gc.collect()
        super().setup_environment()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        steps = self._steps_of_run
        if steps >= _FIRST and steps & (steps - 1) == 0:
            self._collections.renew()
        return result

    @override
    def on_validation_start(self) -> None:
        if self._steps_of_run:
            self._collections.renew()
        super().on_validation_start()

    @override
    def teardown(self) -> None:
        self._collections.end()
        super().teardown()
