"""SIGTERM, and a scheduler's signal to requeue: all ranks end after the same step, with a checkpoint.

A signal reaches ranks at different places of a step, or one rank only. So its handler only notes it. The thread of the
rank's `FailureDetector` tells the others through the store, and then each rank's thread publishes how far its rank has
come. All stop where the one that is ahead comes to next: the others cannot have passed it, and nobody waits for a rank
that waits for it. A step pays one look at a lock.
"""

from __future__ import annotations

import json
import threading
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints
from typing_extensions import override

from lightning_videoscale.compat.lightning import note_sigterm, replace_signal_handlers, scheduler_checkpoint
from lightning_videoscale.compat.lightning.training_loop import (
    accumulates,
    at_end_of_epoch,
    before_each_batch,
    skip_waits_between_batches,
    validate_together,
)
from lightning_videoscale.strategies.failures.answering_store import AnsweringStore
from lightning_videoscale.strategies.parent import StrategyPart

EXIT_CODE = 143
"""Of a process that was asked to end, as a shell shows it: 128 + SIGTERM."""

_ANSWER = 60.0  # s in which every rank's thread says how far its rank is


class _Progress(NamedTuple):
    """How far a rank has come.

    Attributes:
        steps: Ends of optimizer steps that it has passed, counting the beginning of training.
        batches: Batches of a validation that it has begun since.
        of: How many batches that validation has; None outside of one, and where nobody can tell.
        requeue: Whether the job shall be queued again.
    """

    steps: int
    batches: int
    of: int | None
    requeue: bool


class StopAgreement:
    """Where all ranks stop once any of them was asked to."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._lock = threading.Lock()  # not for `ask`, which interrupts whoever holds it
        self._asked = self._requeue = False
        self._is_published = False
        self._steps = self._batches = 0
        self._of: int | None = None
        self._end = (0, 0)
        self._decided = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether this rank was asked to stop, or knows that another was."""
        return self._asked

    @property
    def requeues(self) -> bool:
        """Whether the job shall be queued again."""
        return self._requeue

    def ask(self, *, requeue: bool) -> None:
        """Asks all ranks to stop; called by signal handlers."""
        self._requeue |= requeue
        self._asked = True

    def look(self, store: TCPStore | AnsweringStore) -> None:
        """Tells other ranks, and learns from them; called by a thread every second."""
        if self._decided.is_set():
            return
        if self._asked:
            store.set("stop", "")
        if not self._is_published and store.check(["stop"]):
            self._asked = True
            with self._lock:
                self._is_published = True
                place = _Progress(self._steps, self._batches, self._of, self._requeue)
            store.set(f"stop/{self._rank}", json.dumps(place))
        keys = [f"stop/{rank}" for rank in range(self._size)]
        if self._is_published and store.check(keys):
            self._decide([_Progress(*json.loads(text)) for text in store.multi_get(keys)])

    def _decide(self, places: list[_Progress]) -> None:
        """The same on all ranks."""
        first = max(places)
        # Within a validation only where it is as long on all ranks; hooks at its end may hold collectives.
        within = all(place.steps == first.steps and place.of == first.of for place in places)
        if within and first.of is not None and first.batches < first.of:
            self._end = first.steps, first.batches + 1
        else:
            self._end = first.steps + 1, 0
        self._requeue = any(place.requeue for place in places)
        self._decided.set()

    def passes_step(self) -> bool:
        """Notes that this rank is at the end of a step, or before the first; returns whether to stop here."""
        with self._lock:
            self._steps, self._batches, self._of = self._steps + 1, 0, None
            is_published = self._is_published
        return self._is_here(is_published)

    def passes_validation_batch(self, of: int | None) -> bool:
        """Notes that this rank is before a batch of a validation of so many; returns whether to stop here."""
        with self._lock:
            self._batches, self._of = self._batches + 1, of
            is_published = self._is_published
        return self._is_here(is_published)

    def _is_here(self, is_published: bool) -> bool:
        if self._size == 1:
            return self._asked
        if not is_published:
            return False
        if not self._decided.wait(_ANSWER):
            raise RuntimeError(
                f"Rank {self._rank} was asked to stop and waited {_ANSWER:.0f} s for all {self._size} ranks to say how "
                "far they are. See what they printed first."
            )
        return (self._steps, self._batches) >= self._end


class StopsOnSignals(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _stop: StopAgreement
    _listens_to: pl.Trainer | None = None
    _is_stopping = False
    _has_trained = False

    def _finish_saving(self) -> None:
        """Waits for the checkpoint under way; later ones are written before their save returns. Collective."""
        raise NotImplementedError

    def _wait_at_end_of_epoch(self) -> None:
        """Waits until the epoch has ended on all ranks."""
        raise NotImplementedError

    def _listen(self, trainer: pl.Trainer) -> None:
        """Replaces Lightning's handlers, which begin a collective wherever a rank is when the signal arrives."""
        self._stop = StopAgreement(self.global_rank, self.world_size)
        self._is_stopping = self._has_trained = False
        if trainer is not self._listens_to:
            self._listens_to = trainer
            self._save_and_requeue = replace_signal_handlers(trainer, self._on_sigterm, self._on_requeue)
            before_each_batch(trainer, self._before_batch)
            at_end_of_epoch(trainer, self._wait_at_end_of_epoch)
            skip_waits_between_batches(trainer)
            validate_together(trainer, self.broadcast)

    def _on_sigterm(self) -> None:
        assert self._listens_to is not None
        if self._listens_to.state.fn != TrainerFn.FITTING:  # nothing to save; the failure detectors end the other ranks
            raise SIGTERMException(EXIT_CODE)
        self._stop.ask(requeue=False)

    def _on_requeue(self) -> None:
        self._stop.ask(requeue=True)

    def _before_batch(self) -> None:
        assert self._listens_to is not None
        if not accumulates(self._listens_to) and self._stop.passes_step():
            self._save_and_end()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._listens_to
        assert trainer is not None
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            batches = sum(trainer.num_val_batches)
            if self._stop.passes_validation_batch(int(batches) if batches < float("inf") else None):
                self._save_and_end()
        return super().validation_step(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        # A rank that heard of it after its last step would not find the others any more.
        is_asked = torch.tensor([self._stop.is_asked, self._stop.requeues], dtype=torch.int32, device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(is_asked, dist.ReduceOp.MAX)
        self._has_trained = True
        if is_asked[0]:
            self._save_and_end(requeue=bool(is_asked[1]))

    def _save_and_end(self, requeue: bool | None = None) -> None:
        """On all ranks at the same place."""
        trainer = self._listens_to
        assert trainer is not None
        note_sigterm(trainer)
        self._finish_saving()  # the scheduler may end the job as soon as the next checkpoint is saved
        if self._stop.requeues if requeue is None else requeue:
            self._save_and_requeue()
        else:
            trainer.save_checkpoint(scheduler_checkpoint(trainer))
        rank_zero_info(
            f"The job was asked to end. All ranks stopped after step {trainer.global_step} and saved a checkpoint in "
            f"{trainer.default_root_dir}: continue with fit(..., ckpt_path='hpc'), which SLURM's jobs do by themselves."
        )
        self._is_stopping = True
        raise SIGTERMException(EXIT_CODE)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._has_trained and self._stop.is_asked and not self._is_stopping:
            self._is_stopping = True
            raise SIGTERMException(EXIT_CODE)  # asked after the last step: all is saved, and no other rank need know
