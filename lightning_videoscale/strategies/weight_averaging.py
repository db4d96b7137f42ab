"""What is averaged of weights that are whole or ``DTensor``; Lightning's averages, for whole ones only, are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lightning_videoscale.strategies.checkpoints.optimizer_names import ParameterNames
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.trained_weights import ParameterWeights


class PortableWeights(ParameterWeights):
    """With the names of our checkpoints, of which each rank reads its shard."""

    @override
    def _read(self, saved: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        value: Tensor = SavedTensors.of(saved).read(name, like)
        return value

    @override
    def _aliases(self) -> Mapping[nn.Parameter, Iterable[str]]:
        names = ParameterNames(self._module)
        return {parameter: names[parameter] for parameter in self._module.parameters()}


def check_weight_averaging(trainer: pl.Trainer, strategy: str) -> None:
    """Refuses to fit with a callback that would average what is not the parameters.

    The average is a copy of the LightningModule from before it was sharded. Under FSDP2 it does not fit the parameters,
    under ZeRO-3 these are empty, and under ZeRO-1 and 2 the float32 copies, which are what is trained and saved, never
    receive it.

    Raises:
        ValueError: If it is about to fit with one of Lightning's callbacks for weight averaging.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found = [type(c).__name__ for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)]
    if found and trainer.state.fn == TrainerFn.FITTING:
        raise ValueError(
            f"{found} cannot average the parameters that {strategy} shards: Lightning's weight averaging needs whole "
            "ones. For EMAWeightAveraging(decay=...) write lightning_videoscale.callbacks.EMA(decay=...), which "
            "averages shards. For others leave the callback out, or train under ulysses_ddp or usp_ddp."
        )
