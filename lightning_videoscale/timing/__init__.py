"""Where a rank's time goes: its own work, waiting for others, exchanging, waiting for data.

- `step_times`: `StepTimes`, the time of one micro-batch by phase; `add_up` for those of an optimizer step.
- `load`: `MicroBatchLoad`, how much a micro-batch is, and `load_of`, which reads it from a batch.
- `step_log`: `subscribe_to_steps`, windows of all ranks' steps, which one log per Trainer gathers for all subscribers.
- `step_window`: `StepWindow`, what a subscriber receives.
- `step_timer`: `StepTimer`, this rank's times alone, by a clock with hooks into a Trainer.
- `clock`: `StepClock`, behind it.
- `marks`: what the clock reads: CUDA events, or the host's clock.
- `pause`: `unwatched`, around what is no training; `Pauses`, for those who look away.
- `synchronization`: where the frameworks wait for other ranks.

Called in ``on_train_start``, this hands 50 optimizer steps at a time to `receive`, on every rank:

    def receive(window: StepWindow) -> None:
        print(window.column("wait"))  # seconds of every rank and micro-batch

    subscribe_to_steps(trainer, 50, receive)
"""

from lightning_videoscale.timing.clock import StepClock
from lightning_videoscale.timing.load import MicroBatchLoad, load_of
from lightning_videoscale.timing.marks import CudaMarks, Marks, marks_on
from lightning_videoscale.timing.pause import LooksAway, Pauses, unwatched
from lightning_videoscale.timing.step_log import check_interval, subscribe_to_steps
from lightning_videoscale.timing.step_timer import StepTimer
from lightning_videoscale.timing.step_times import Phase, StepTimes, add_up
from lightning_videoscale.timing.step_window import FIELDS, StepWindow

__all__ = [
    "FIELDS",
    "CudaMarks",
    "LooksAway",
    "Marks",
    "MicroBatchLoad",
    "Pauses",
    "Phase",
    "StepClock",
    "StepTimer",
    "StepTimes",
    "StepWindow",
    "add_up",
    "check_interval",
    "load_of",
    "marks_on",
    "subscribe_to_steps",
    "unwatched",
]
