"""What a loader cannot know that was made without a Trainer: the other ranks, and whether its loss weights count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.planning import MicroBatch

_INSTEAD = "Give the Trainer the DataModule: trainer.fit(module, datamodule=data)."


class SamplerWithoutTrainer(PlannedSampler):
    """The micro-batches of the only data-parallel rank, which looks whether it is the only one when a pass begins.

    A Trainer that is given the loader never meets the DataModule: each of its ranks would train on all data, and nobody
    adds what applies the loss weights.
    """

    _has_warned = False

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields the micro-batches of the epoch.

        Raises:
            RuntimeError: If there are other data-parallel ranks. The message names the fix.
        """
        self._check_ranks()
        self._warn_of_weights()
        yield from super().__iter__()

    def _check_ranks(self) -> None:
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if (ranks := processes // self.sharing) > self.num_replicas:
            raise RuntimeError(
                f"This loader was made without a Trainer, for {self.num_replicas} data-parallel rank, and there are "
                f"{ranks}: each would train on all data. {_INSTEAD} Fabric has no such way. Where all ranks train on "
                f"one batch together in a loop of your own, say so: loader.sampler.sharing = {processes}."
            )

    def _warn_of_weights(self) -> None:
        weights = self.plan.weight
        if not self._has_warned and not np.allclose(weights, 1):
            self._has_warned = True
            rank_zero_warn(
                "This loader was made without a Trainer, so that nobody sees to it that its batches' loss weights, "
                f"{weights.min():.3g} to {weights.max():.3g}, count. {_INSTEAD} Else weigh each loss by "
                "batch['meta'].loss_weight, as the callback LossWeighting and our strategies do."
            )
