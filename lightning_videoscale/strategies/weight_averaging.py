"""Lightning's weight averaging, which knows whole parameters only, is refused where a rank has a share of them."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


def check_weight_averaging(trainer: pl.Trainer, strategy: str) -> None:
    """Refuses to fit with a callback that would average what is not the parameters.

    The average is a copy of the LightningModule from before it was sharded. Under FSDP2 it does not fit the parameters,
    under ZeRO-3 these are empty, and under ZeRO-1 and 2 the float32 copies, which are what is trained and saved, never
    receive it.

    Args:
        trainer: The Trainer, whose callbacks are looked at.
        strategy: Name of the strategy, for the message.

    Raises:
        ValueError: If it is about to fit with one of Lightning's callbacks for weight averaging.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found = [type(c).__name__ for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)]
    if found and trainer.state.fn == TrainerFn.FITTING:
        raise ValueError(
            f"{found} cannot average the parameters that {strategy} shards: Lightning's weight averaging needs whole "
            "ones. Leave the callback out, or train under ulysses_ddp or usp_ddp."
        )
