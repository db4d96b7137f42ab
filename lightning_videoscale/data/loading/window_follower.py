"""What a Trainer is told where one window of an epoch ends and the next begins."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_videoscale.data.loading.consistency import check_same_plan
from lightning_videoscale.data.loading.data_warnings import warn_of_oversized
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.loading.trainer import announce_shapes, first_callback, tell_length


def follow(trainer: pl.Trainer, sampler: PlannedSampler) -> None:
    """Tells a Trainer what it asks of the sampler that it reads from now on, here and in each window."""
    announce_shapes(trainer, sampler)
    if sampler.planner.windows is not None:
        WindowFollower.of(trainer).follow(sampler)


class WindowFollower(pl.Callback):
    """Follows the training from window to window, on all ranks at the same micro-batch.

    Ranks read ahead, each a little differently, and so come to the next window's plan at different times. How long the
    epoch is decides when to validate and where to stop, so a Trainer may learn it only where its rank trains. Here the
    ranks also compare their plans: the first of another kind would be a collective that not all of them begin.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, FollowedEpoch] = {}  # by their windows: a step may have clips of several DataModules

    def follow(self, sampler: PlannedSampler) -> None:
        """Follows an epoch from now on, in the place of the one before of the same clips."""
        self._epochs[id(sampler.planner.windows)] = FollowedEpoch(sampler)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forgets the run before: the next one may be of other data."""
        self._epochs.clear()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Turns to the next window where the last micro-batch of one is trained.

        Raises:
            ValueError: On every rank, if any has planned another window than rank 0.
            RuntimeError: If the window could not be planned; with the cause.
        """
        for epoch in self._epochs.values():
            epoch.reach(trainer, batch_idx + 1)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> WindowFollower:
        """The one of a Trainer, which is added where there is none."""
        return first_callback(trainer, cls)


class FollowedEpoch:
    """An epoch in windows, and the one of these that a Trainer knows of."""

    def __init__(self, sampler: PlannedSampler) -> None:
        self._sampler, self._window = sampler, sampler.plan.window
        self._longest = int(sampler.planner.table.sequence_lengths.max())

    def reach(self, trainer: pl.Trainer, micro_batches: int) -> None:
        """Turns to another window where so many micro-batches of the epoch end one; raises as its caller does."""
        place = self._sampler.reach(micro_batches)
        if place.plan.window is self._window:
            return
        self._window = place.plan.window
        check_same_plan(trainer, place.plan.digest)
        tell_length(trainer, self._sampler, len(place))
        if (longest := int(place.plan.table.sequence_lengths.max())) > self._longest:
            self._longest = longest
            warn_of_oversized(place.plan.table, self._sampler.planner.budget)
