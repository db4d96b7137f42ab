"""Exponential moving averages of the trained weights, under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_videoscale.compat.lightning import has_fitted_elsewhere
from lightning_videoscale.trained_weights import (
    AVERAGES,
    TrainedWeights,
    check_trained_weights,
    trained_weights_of,
)

_FROM_CHECKPOINT = (
    "Take them from a checkpoint that was saved in fit: with ckpt_path='best' of validate, test and predict, or by "
    "vs.strategies.read_weights(path, averaged=True)."
)


class EMA(pl.Callback):
    """Keeps an exponential moving average of what is trained, and validates, tests and predicts with it.

    After an optimizer step the average becomes ``decay * average + (1 - decay) * weights``; the first one is a copy.
    Each rank averages what it holds: its shard under FSDP2, its part of the float32 master weights under ZeRO, all of
    it under DDP. Nothing is gathered for that. Averages are float32 or wider. Buffers and what is frozen are not
    averaged.

    Training never sees the average: parameters hold it in ``validate``, ``test`` and ``predict`` loops, also those
    within ``fit``, and get their own values back at the end or at an exception. That takes memory for a second copy of
    what the rank holds of the parameters. After ``fit`` the module has the trained weights. To save or sample with the
    average, on all ranks::

        with ema.average_weights():
            module.transformer.save_pretrained("averaged")

    Checkpoints hold both, by parameter name, so that a resumed run goes on to the bit, also on another number of ranks
    or under another of our strategies. ``videoscale export`` writes the averages, as ``--no-ema`` does the weights in
    training.

    Works under our strategies, on a single device and under Lightning's DDP.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, first_step: int = 0) -> None:
        """Creates the callback.

        Args:
            decay: Share of the average that stays in an update, in [0, 1].
            every_n_steps: Optimizer steps from update to update: after those whose number, from 0, it divides.
            first_step: Number of the optimizer step, from 0, after which the average may begin. Until it has begun,
                there is none, and validation runs with the weights in training.

        Raises:
            ValueError: A number is out of its range.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} must be in [0, 1].")
        if every_n_steps < 1 or first_step < 0:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1, first_step={first_step} at least 0.")
        self.decay, self.every_n_steps, self.first_step = decay, every_n_steps, first_step
        self._module: pl.LightningModule | None = None
        self._weights: TrainedWeights | None = None
        self._kept_as: type[TrainedWeights] | None = None  # where the average's elements lie
        self._average: dict[str, Tensor] = {}
        self._has_begun = False
        self._saved: Mapping[str, Any] | None = None  # of a checkpoint, until the parameters are where they stay
        self._latest_update = 0  # optimizer steps that were done then
        self._viewers = 0  # loops and contexts that show the average, one within the other
        self._show_trained: Callable[[], None] | None = None

    # -- averaging -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, trainer: pl.Trainer) -> None:
        """Takes the weights after the last optimizer step into the average, unless that is done.

        Local, but for the first call after a checkpoint was loaded, whose averages it takes up.
        """
        if self._saved is not None:  # whoever calls comes before this callback
            self._prepared(trainer)
        steps = trainer.global_step
        if not self._is_due(steps):
            return
        shares = self._prepared(trainer).shares()
        for key, share in shares.items():
            if key not in self._average:  # it was frozen when training began
                self._average[key] = share.to(_wide(share), copy=True)
            elif not self._has_begun:
                self._average[key].copy_(share)
        if self._has_begun:
            self._move_towards(shares)
        self._has_begun, self._latest_update = True, steps

    def _is_due(self, steps: int) -> bool:
        """Whether one of every n steps is among those since the last update: each optimizer's counts."""
        latest = (steps - 1) // self.every_n_steps * self.every_n_steps
        return latest >= max(self.first_step, self._latest_update)

    def _move_towards(self, shares: Mapping[str, Tensor]) -> None:
        alike = [key for key, share in shares.items() if share.dtype == self._average[key].dtype]
        if alike:
            averages, weights = [self._average[key] for key in alike], [shares[key] for key in alike]
            get_ema_multi_avg_fn(self.decay)(averages, weights, None)  # in few kernels
        for key in shares.keys() - set(alike):  # one after the other, for the memory of the copies
            self._average[key].lerp_(shares[key].to(self._average[key]), 1 - self.decay)

    @contextmanager
    def average_weights(self) -> Iterator[None]:
        """Lets the parameters hold the average within; collective over all ranks to enter.

        Before there is an average nothing changes, and where the parameters hold it already, they go on to.

        Raises:
            RuntimeError: If no Trainer has set the callback up in this process, as where `fit` started others.
        """
        if self._module is None:
            raise RuntimeError(
                "EMA has averaged nothing in this process: call average_weights after fit has begun. Where fit starts "
                f"processes of its own, as from notebooks, averages end with them. {_FROM_CHECKPOINT}"
            )
        self._show_average()
        try:
            yield
        finally:
            self._show_weights()

    def _prepared(self, trainer: pl.Trainer) -> TrainedWeights:
        """The trained weights; takes up what a checkpoint brought, now that the parameters are where they stay."""
        if self._weights is None:
            self._weights = trained_weights_of(trainer)
        if self._saved is not None:
            found, self._saved = self._weights.from_names(self._saved), None
            self._reserve(self._weights)
            for key, average in self._average.items():
                average.copy_(found[key])
            self._has_begun = True
        return self._weights

    def _reserve(self, weights: TrainedWeights) -> None:
        """Takes the memory of an average before `budget="auto"` measures how much is left.

        Of what an earlier fit did not train, the average begins with the weights, as it has begun already. What only
        the earlier fit trained is averaged no more: all else trains beside its weights now.

        Raises:
            ValueError: If the earlier fit's average is of other elements, as its strategy shared parameters out.
        """
        shares = weights.shares()
        held = [key for key in self._average if key in shares]
        moved = self._average and not held and type(weights) is not self._kept_as
        if moved or any(self._average[key].shape != shares[key].shape for key in held):
            raise ValueError(
                "EMA holds averages of an earlier fit, whose strategy shared the parameters out otherwise than "
                f"{type(weights).__name__} of this one does. Give this Trainer an EMA of its own, and go on from a "
                "checkpoint of that fit: trainer.save_checkpoint(path) there, fit(..., ckpt_path=path) here."
            )
        self._kept_as = type(weights)
        self._average = {key: average for key, average in self._average.items() if key in shares}
        for key, share in shares.items():
            if key not in self._average:
                self._average[key] = share.to(_wide(share), copy=True)

    def _show_average(self) -> None:
        self._viewers += 1
        if self._viewers == 1 and self._has_begun and self._weights is not None:
            self._show_trained = self._weights.show(self._average)

    def _show_weights(self) -> None:
        self._viewers = max(self._viewers - 1, 0)  # an exception has sent all of them away
        if self._viewers == 0 and self._show_trained is not None:
            show, self._show_trained = self._show_trained, None
            show()

    # -- the Trainer's hooks -------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forgets another module's average, and refuses what could not be averaged."""
        check_trained_weights(trainer)
        if pl_module is not self._module:
            self._module, self._average, self._has_begun, self._latest_update = pl_module, {}, False, 0
            self._weights = None
        self._saved = None
        if stage != "fit":
            return
        self._weights = None  # a run may share the parameters out anew
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if any(isinstance(callback, ModelCheckpoint) and callback.save_weights_only for callback in callbacks):
            rank_zero_warn(
                "A ModelCheckpoint(save_weights_only=True) saves no averages: Lightning does not ask callbacks there. "
                "Leave save_weights_only out."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the memory that the average will need."""
        self._weights = trained_weights_of(trainer)
        self._reserve(self._weights)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up what a checkpoint brought."""
        self._prepared(trainer)
        self._latest_update = trainer.global_step  # what came before is in the average, or another Trainer's

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average after an optimizer step."""
        self.update(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the average.

        Raises:
            RuntimeError: If it has ended with the processes of `fit`, as from notebooks.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self._prepared(trainer)
        elif not self._has_begun and not trainer.ckpt_path and has_fitted_elsewhere(trainer.strategy.launcher):
            raise RuntimeError(f"The averages of EMA have ended with the processes of fit. {_FROM_CHECKPOINT}")
        self._show_average()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the trained weights; after what modules do at the end of the epoch, before checkpoints."""
        self._show_weights()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Shows the trained weights; waits for no other rank."""
        self._viewers = 0
        self._show_weights()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns when the average was updated."""
        return {"latest_update": self._latest_update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self._latest_update = state_dict["latest_update"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the averages by name; collective."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.update(trainer)  # who saves may come before this callback
        weights = self._prepared(trainer)
        if not self._has_begun:
            return
        checkpoint[AVERAGES] = weights.to_names(self._average)
        if self._show_trained is not None:  # somebody saves within validation
            checkpoint["state_dict"] |= weights.to_names(weights.shares())

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the averages; where nothing is trained, they become the module's weights.

        Raises:
            ValueError: If the checkpoint has averages of Lightning's ``WeightAveraging``.
        """
        if "averaging_state" in checkpoint:
            raise ValueError(
                "The checkpoint was saved with Lightning's WeightAveraging, which keeps the average in the place of "
                "the weights. Go on with that callback, or start from the weights alone: "
                "module.load_state_dict(checkpoint['current_model_state'])."
            )
        saved = checkpoint.get(AVERAGES)
        if not saved:
            rank_zero_warn("The checkpoint holds no averages of EMA: they begin anew with its weights.")
            self._has_begun = False
        elif trainer.state.fn == TrainerFn.FITTING:
            self._saved = saved
        else:
            averaged = checkpoint | {"state_dict": checkpoint["state_dict"] | saved}
            trainer.strategy.load_model_state_dict(averaged, strict=pl_module.strict_loading)
            self._has_begun = False  # these are the module's weights now; an earlier fit's average is of others


def _wide(share: Tensor) -> torch.dtype:
    return torch.promote_types(share.dtype, torch.float32)
