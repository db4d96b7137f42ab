"""Where a rank's time goes: its own work, waiting for others, exchanging, waiting for data.

- `step_times`: `StepTimes`, the time of one micro-batch, told apart; `add_up` for those of an optimizer step.
- `attachment`: `watch_steps`, puts the one clock of a Trainer on it and returns a reader, a `StepWatch`.
- `clock`: `StepClock`, behind it.
- `marks`: what the clock reads: CUDA events, or the host's clock.
- `synchronization`: where the frameworks wait for other ranks.

    watch = watch_steps(trainer)  # in on_train_start
    ...
    for times in watch.read():  # in on_train_batch_end, every so many steps: one per micro-batch since the last read
        print(times.compute, times.wait)
    ...
    watch.close()  # in on_train_end
"""

from lightning_videoscale.timing.attachment import watch_steps
from lightning_videoscale.timing.clock import StepClock, StepWatch
from lightning_videoscale.timing.marks import CudaMarks, HostMarks, Marks, marks_on
from lightning_videoscale.timing.step_times import Phase, StepTimes, add_up

__all__ = [
    "CudaMarks",
    "HostMarks",
    "Marks",
    "Phase",
    "StepClock",
    "StepTimes",
    "StepWatch",
    "add_up",
    "marks_on",
    "watch_steps",
]
