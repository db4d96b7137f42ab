"""When a strategy lets kernels of attention and schedules of the exchange be measured and chosen.

That is after steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.choices import MICRO_BATCHES_PER_SHAPE
from lightning_videoscale.graphs import Recorder
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.strategies.parent import StrategyPart
from lightning_videoscale.strategies.settings import SequenceParallelSettings


class ChoosesByMeasuring(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    def _init_choices(self, settings: SequenceParallelSettings) -> None:
        self.attention_choices = AttentionChoices(settings.attention_backend, log=rank_zero_info)
        self._only_serial = settings.only_serial if settings.schedule == "auto" else None
        self.schedule_choices = ScheduleChoices(
            settings.schedule if self._only_serial is None else "serial", log=rank_zero_info
        )
        self._steps_of_run = 0

    def expect_shapes(self, micro_batches_per_shape: float) -> None:
        """See `topology.ExpectsShapes`: what a kernel takes longer for the first call of a shape is spread over it."""
        self.attention_choices.expect(micro_batches_per_shape)

    def _prepare_choices(self, *, by_graphs: bool) -> None:
        """To be called before the model is changed; collective over all ranks.

        Steps run `by_graphs`, CUDA graphs, or may come to.
        """
        self._steps_of_run = 0
        self.attention_choices.prepare(self.root_device)
        trainer = self._module.trainer
        micro_batches = trainer.max_steps * trainer.accumulate_grad_batches
        # What the data say, they say later.
        self.expect_shapes(min(MICRO_BATCHES_PER_SHAPE, micro_batches if micro_batches > 0 else math.inf))
        self.schedule_choices.recorder = Recorder if by_graphs and self.root_device.type == "cuda" else None
        if self._only_serial is not None:
            rank_zero_info(
                f"schedule='auto' is 'serial' beside {self._only_serial}, as blocks would be compiled anew for each "
                "choice. Others run there by name."
            )

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps_of_run += 1
        if self._steps_of_run & (self._steps_of_run - 1) == 0:
            # This measures what steps have asked for, is collective, and new shapes come ever more rarely: log2(steps)
            # times in a run. Schedules go after the kernels that run in them.
            self.attention_choices.settle()
            self.schedule_choices.settle()
        return result

    def describe_schedules(self) -> dict[str, str]:
        """Which schedule runs each kind of layer that has run, and what it was chosen by; empty unless by "auto"."""
        return self.schedule_choices.describe()
