"""When a strategy lets the kernels of attention be measured and chosen: after steps 1, 2, 4, 8 and so on."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionBackend, AttentionChoices
from lightning_videoscale.attention.choices import MICRO_BATCHES_PER_SHAPE
from lightning_videoscale.strategies.parent import StrategyPart


class ChoosesAttention(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    def _init_attention(self, backend: AttentionBackend) -> None:
        self.attention_choices = AttentionChoices(backend, log=rank_zero_info)
        self._steps_of_run = 0

    def expect_shapes(self, micro_batches_per_shape: float) -> None:
        """See `topology.ExpectsShapes`: what a kernel takes longer for the first call of a shape is spread over it."""
        self.attention_choices.expect(micro_batches_per_shape)

    def _prepare_attention(self) -> None:
        """To be called before the model is changed; collective over all ranks."""
        self._steps_of_run = 0
        self.attention_choices.prepare(self.root_device)
        trainer = self._module.trainer
        micro_batches = trainer.max_steps * trainer.accumulate_grad_batches
        # What the data say, they say later.
        self.expect_shapes(min(MICRO_BATCHES_PER_SHAPE, micro_batches if micro_batches > 0 else math.inf))

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps_of_run += 1
        if self._steps_of_run & (self._steps_of_run - 1) == 0:
            # This is collective, and new shapes come ever more rarely: log2(steps) times in a run.
            self._settle_choices()
        return result

    def _settle_choices(self) -> None:
        """Measures what steps have asked for; collective over all ranks."""
        self.attention_choices.settle()
