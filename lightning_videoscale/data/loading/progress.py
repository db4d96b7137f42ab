"""Where a run stands in its epoch: what a checkpoint keeps of the data, and how a run goes on from there.

Samples count as consumed when their optimizer step is done, not when they are read: workers are far ahead. A state
names what the plan began with, how many of its steps are done, and which draws are done with them. A run that goes on
with the same settings plans the same plan and leaves these steps out; a run with other settings (ranks, micro-batches,
budget, balance) plans what is left of the epoch anew. Either is as fast at the end of an epoch as at its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_videoscale.data.planning import BucketPlanner, EpochPlan

_VERSION = 2


@dataclass(frozen=True)
class Progress:
    """A place in a run.

    Attributes:
        epoch: Number of the epoch.
        plan: The plan of it, or of what was left of it.
        begun: (draws,) what of the epoch was done before this plan; None: nothing.
        counted: Micro-batches that each rank had trained in this epoch before this plan; a multiple of those of a step.
        steps: Steps of the plan that are done.
        trained_as: The epoch as the Trainer counts it. It goes ahead of ``epoch`` where a run was stopped within an
            epoch that the Trainer takes for complete (``max_steps``, ``max_time``): the rest is trained as the next,
            and no epoch is left out for it.
    """

    epoch: int
    plan: EpochPlan
    begun: NDArray[np.bool_] | None = None
    counted: int = 0
    steps: int = 0
    trained_as: int = 0

    @classmethod
    def start(cls, planner: BucketPlanner, epoch: int, trained_as: int | None = None) -> Progress:
        """The beginning of an epoch, which the Trainer counts by the same number if none is given."""
        return cls(epoch, planner.plan(epoch), trained_as=epoch if trained_as is None else trained_as)

    @classmethod
    def resume(cls, planner: BucketPlanner, state: Mapping[str, Any]) -> Progress:
        """Goes on from a state; at the next epoch, where nothing of its own is left.

        Args:
            planner: How to plan from now on.
            state: What `state_dict` returned, maybe under another planner.

        Raises:
            ValueError: If the state is of another version.
        """
        if state["version"] != _VERSION:
            raise ValueError(
                f"The checkpoint's data state has version {state['version']}, this release reads {_VERSION}."
            )
        epoch, draws, trained_as = state["epoch"], state["draws"], state["trained_as"]
        if state["is_over"]:
            return cls.start(planner, epoch + 1, trained_as + 1)
        done = _unpack(state["done"], draws)
        if state["has_ended"]:
            return cls(epoch, planner.plan(epoch, done), done, trained_as=trained_as + 1)
        begun = _unpack(state["begun"], draws)
        plan = planner.plan(epoch, begun)
        if plan.digest == state["plan"]:
            return cls(epoch, plan, begun, state["counted"], state["steps"], trained_as)
        # Lightning counts the micro-batches of an epoch to know when a step is complete.
        whole_steps = -(-state["micro_batches_done"] // planner.micro_batches)
        return cls(epoch, planner.plan(epoch, done), done, whole_steps * planner.micro_batches, trained_as=trained_as)

    def replan(self, planner: BucketPlanner, micro_batches: int) -> Progress | None:
        """The same epoch with another plan, from the first step on that is not begun; None where nothing is left.

        Args:
            planner: Plans for as many ranks and micro-batches per step.
            micro_batches: What any rank has begun of this epoch.
        """
        steps = -(-max(self.done - self.counted, micro_batches - self.counted) // self.micro_batches)
        done = self.plan.done_after(steps)
        if done.all():
            return None
        counted = self.counted + steps * self.micro_batches
        return Progress(self.epoch, planner.plan(self.epoch, done), done, counted, trained_as=self.trained_as)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step and rank."""
        return int(self.plan.grid.shape[2])

    @property
    def done(self) -> int:
        """Micro-batches that each rank has trained in this epoch."""
        return self.counted + self.steps * self.micro_batches

    def __len__(self) -> int:
        """Micro-batches that each rank trains in this epoch, those before this plan included."""
        return self.counted + int(self.plan.grid.shape[0]) * self.micro_batches

    def state_dict(self, micro_batches: int, is_over: bool = False, has_ended: bool = False) -> dict[str, Any]:
        """Returns the state after a number of micro-batches; a step that is not complete does not count.

        Args:
            micro_batches: What each rank has trained in this epoch.
            is_over: Whether the rest of the epoch, if any, is not to be trained.
            has_ended: Whether the Trainer takes the epoch for complete; the rest is then trained as the next.
        """
        steps = max(0, micro_batches - self.counted) // self.micro_batches
        done = self.plan.done_after(steps)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "trained_as": self.trained_as,
            "draws": len(done),
            "begun": _pack(self.begun),
            "counted": self.counted,
            "steps": steps,
            "plan": self.plan.digest,
            "done": _pack(done),
            "is_over": is_over or bool(done.all()),
            "has_ended": has_ended,
            "micro_batches_done": self.counted + steps * self.micro_batches,
        }


def _pack(done: NDArray[np.bool_] | None) -> Tensor | None:
    """One bit per draw; None for none."""
    return None if done is None or not done.any() else torch.from_numpy(np.packbits(done))


def _unpack(bits: Tensor | None, draws: int) -> NDArray[np.bool_] | None:
    return None if bits is None else np.unpackbits(bits.numpy(), count=draws).astype(bool)
