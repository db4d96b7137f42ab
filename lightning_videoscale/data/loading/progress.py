"""Where a run stands in its epoch: what a checkpoint keeps of the data, and how a run goes on from there.

Samples count as consumed when their optimizer step is done, not when they are read: workers are far ahead. A state
names what the plan began with, how many of its steps are done, and which draws are done with them. A run that goes on
with the same settings plans the same plan and leaves these steps out; a run with other settings (ranks, micro-batches,
budget, balance) plans what is left of the epoch anew. Either is as fast at the end of an epoch as at its beginning.

Where epochs are planned in windows, all of this holds for a window and what it carries. What came before is done, and
what comes later is not: a run may go on with windows of another size, from the next window on, or with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_videoscale.data.planning import BucketPlanner, EpochPlan
from lightning_videoscale.data.planning.windows import Window

_VERSION, _OF_WINDOWS = 2, 3
"""Of a state of a whole epoch, and of a window's, which earlier releases would take for one."""


@dataclass(frozen=True)
class Progress:
    """A place in a run.

    Attributes:
        epoch: Number of the epoch.
        plan: The plan of it or of a window of it, or of what was left of either.
        begun: (draws,) what of the plan's draws was done before it; None: nothing.
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
        started = cls(epoch, planner.plan(epoch), trained_as=epoch if trained_as is None else trained_as)
        return started._or_next(planner)

    @classmethod
    def resume(cls, planner: BucketPlanner, state: Mapping[str, Any]) -> Progress:
        """Goes on from a state; at the next epoch, where nothing of its own is left.

        Raises:
            ValueError: If the state is of another version.
        """
        if state["version"] not in (_VERSION, _OF_WINDOWS):
            raise ValueError(
                f"The checkpoint's data state has version {state['version']}, this release reads {_VERSION} and "
                f"{_OF_WINDOWS}."
            )
        epoch, draws, trained_as = state["epoch"], state["draws"], state["trained_as"]
        if state["is_over"]:
            return cls.start(planner, epoch + 1, trained_as + 1)
        # Lightning counts the micro-batches of an epoch to know when a step is complete.
        whole_steps = -(-state["micro_batches_done"] // planner.micro_batches)
        if state.get("repeats"):
            again = cls.start(planner, epoch, trained_as)
            return replace(again, counted=again.counted + whole_steps * planner.micro_batches)
        done, begun = _unpack(state["done"], draws), _unpack(state["begun"], draws)
        window = _window_of(state)
        if window is not None and planner.windows is None:
            done, begun, window = _of_epoch(window, done), _of_epoch(window, begun), None
        elif window is None and planner.windows is not None:
            window = Window(0, draws, draws)

        def planned(before: NDArray[np.bool_] | None, counted: int, steps: int = 0, ahead: int = 0) -> Progress:
            plan = planner.plan(epoch, before, window)
            return cls(epoch, plan, before, counted, steps, trained_as + ahead)

        if state["has_ended"]:
            return planned(done, 0, ahead=1)._or_next(planner)
        same = planned(begun, state["counted"], state["steps"])
        if same.plan.digest == state["plan"]:
            return same._or_next(planner)
        return planned(done, whole_steps * planner.micro_batches)._or_next(planner)

    def replan(self, planner: BucketPlanner, micro_batches: int) -> Progress | None:
        """The same epoch with another plan, from the first step on that is not begun; None where nothing is left."""
        steps = -(-max(self.done - self.counted, micro_batches - self.counted) // self.micro_batches)
        done = self.plan.done_after(steps)
        if done.all() and self.plan.ends_epoch:
            return None
        counted = self.counted + steps * self.micro_batches
        plan = planner.plan(self.epoch, done, self.plan.window)
        return Progress(self.epoch, plan, done, counted, trained_as=self.trained_as)._or_next(planner)

    def next_window(self, planner: BucketPlanner) -> Progress:
        """The place where this plan's last step is done: the next window's beginning, with what this one leaves."""
        return self._next(planner)._or_next(planner)

    def _next(self, planner: BucketPlanner) -> Progress:
        return Progress(
            self.epoch, planner.following(self.epoch, self.plan), None, self.end, trained_as=self.trained_as
        )

    def _or_next(self, planner: BucketPlanner) -> Progress:
        """This place; or that in a later window, where nothing of this one makes a whole step."""
        place = self
        while not (place.plan.steps or place.plan.ends_epoch):
            place = place._next(planner)
        return place

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step and rank."""
        return int(self.plan.grid.shape[2])

    @property
    def done(self) -> int:
        """Micro-batches that each rank has trained in this epoch."""
        return self.counted + self.steps * self.micro_batches

    @property
    def end(self) -> int:
        """Micro-batches that each rank has trained in this epoch when this plan's last step is done."""
        return self.counted + self.plan.steps * self.micro_batches

    def __len__(self) -> int:
        """Micro-batches that each rank trains in this epoch, those before this plan included.

        Those of later windows are estimated. They are at least one step, so that no epoch ends before its last window.
        """
        return self.end + self.plan.later_steps * self.micro_batches

    def state_dict(
        self, micro_batches: int, is_over: bool = False, has_ended: bool = False, repeats: bool = False
    ) -> dict[str, Any]:
        """Returns the state after a number of micro-batches; a step that is not complete does not count.

        Args:
            micro_batches: What each rank has trained in this epoch.
            is_over: Whether the rest of the epoch, if any, is not to be trained.
            has_ended: Whether the Trainer takes the epoch for complete; the rest is then trained as the next.
            repeats: Whether the epoch goes on when all of it is trained, as beside a longer loader.
        """
        steps = max(0, micro_batches - self.counted) // self.micro_batches
        done = self.plan.done_after(steps)
        window = self.plan.window
        is_whole = window is None or (window.is_last and not window.first)
        return {
            "version": _VERSION if is_whole else _OF_WINDOWS,
            **({} if window is None or is_whole else {"window": _kept(window)}),
            "epoch": self.epoch,
            "trained_as": self.trained_as,
            "draws": len(done),
            "begun": _pack(self.begun),
            "counted": self.counted,
            "steps": steps,
            "plan": self.plan.digest,
            "done": _pack(done),
            "is_over": is_over or (not repeats and self.plan.ends_epoch and bool(done.all())),
            **({"repeats": True} if repeats else {}),
            "has_ended": has_ended,
            "micro_batches_done": self.counted + steps * self.micro_batches,
        }


def _kept(window: Window) -> dict[str, Any]:
    return {**window._asdict(), "carried": torch.from_numpy(window.carried)}


def _window_of(state: Mapping[str, Any]) -> Window | None:
    kept = state.get("window")
    return None if kept is None else Window(**{**kept, "carried": kept["carried"].numpy()})


def _of_epoch(window: Window, done: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """(draws,) what of a whole epoch is done where that of a window is; None: nothing of the window."""
    of_epoch = np.arange(window.total) < window.last
    of_epoch[window.draws] = False if done is None else done
    return of_epoch


def _pack(done: NDArray[np.bool_] | None) -> Tensor | None:
    """One bit per draw; None for none."""
    return None if done is None or not done.any() else torch.from_numpy(np.packbits(done))


def _unpack(bits: Tensor | None, draws: int) -> NDArray[np.bool_] | None:
    return None if bits is None else np.unpackbits(bits.numpy(), count=draws).astype(bool)
