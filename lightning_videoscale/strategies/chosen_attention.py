"""When a strategy lets the kernels of attention be measured and chosen: after steps 1, 2, 4, 8 and so on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionBackend, AttentionChoices

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Parent
else:
    _Parent = object


class ChoosesAttention(_Parent):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    def _init_attention(self, backend: AttentionBackend) -> None:
        self.attention_choices = AttentionChoices(backend, log=rank_zero_info)
        self._steps_of_run = 0

    def _prepare_attention(self) -> None:
        """To be called before the model is changed; collective over all ranks."""
        self._steps_of_run = 0
        self.attention_choices.prepare(self.root_device)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps_of_run += 1
        if self._steps_of_run & (self._steps_of_run - 1) == 0:
            # All ranks meet here, and new shapes come ever more rarely: log2(steps) meetings in a run.
            self.attention_choices.settle()
        return result
