"""Do all ranks go backward, and step, equally often in each micro-batch? `BackwardCounts`.

In manual optimization a user's code decides that: it may leave out a sample whose advantage is zero, or a step whose
loss is not finite. A rank that goes backward once more waits in an average of gradients for its peers, and pairs with
that of their next step. Nothing fails then, and all gradients from there on are of two steps.

Each rank counts, and its failure detector compares the counts with those of the next rank every second, over the store.
At the end of an epoch all ranks compare. A step pays for no message.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.strategies.failures.answering_store import AnsweringStore
from lightning_videoscale.strategies.parent import StrategyPart

_KEPT = 4096  # micro-batches that a rank may be ahead of what it hears of another


class BackwardCounts:
    """Counts of this rank, and what other ranks have published of theirs.

    Args:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._next = rank, (rank + 1) % size
        # Micro-batches that are begun, backwards and steps of the last; one object, as a thread reads it. What comes
        # before the first is no training.
        self._now = (0, 0, 0)
        self._digests: OrderedDict[int, int] = OrderedDict({0: 0})  # of all counts until the end of a micro-batch
        self._last = (0, 0, 0, 0)  # micro-batch, digest, backwards and steps
        self._ends = 0

    def begin_batch(self) -> None:
        """Ends the micro-batch under way, if there is one, and begins the next."""
        self._end_batch()
        self._now = (self._now[0] + 1, 0, 0)

    def count_backward(self) -> None:
        """To be called before each backward that averages gradients."""
        batch, backwards, steps = self._now
        self._now = (batch, backwards + 1, steps)

    def count_step(self) -> None:
        """To be called after each step of an optimizer."""
        batch, backwards, steps = self._now
        self._now = (batch, backwards, steps + 1)

    def look(self, store: TCPStore | AnsweringStore) -> None:
        """Publishes this rank's counts and compares those of the next; called by a thread each second."""
        store.set(f"backwards/{self._rank}", json.dumps(self._last))
        if store.check([f"backwards/{self._next}"]):
            batch, *counts = self._now  # first: what is counted meanwhile is of a later moment
            what = self._difference(batch, counts, *json.loads(store.get(f"backwards/{self._next}")))
            if what:
                store.compare_set("first_error", "", f"rank {self._rank}: {what}")

    def tell_end(self, store: TCPStore | AnsweringStore) -> None:
        """Publishes all counts at the end of an epoch, before the ranks wait for each other."""
        self._end_batch()
        mine = str(self._last[1])
        if store.compare_set(f"backwards/end/{self._ends}", "", mine).decode() != mine:
            store.set(f"backwards/apart/{self._ends}", "")

    def check_end(self, store: TCPStore | AnsweringStore) -> None:
        """Compares them, when all ranks have published theirs.

        Raises:
            RuntimeError: On all ranks, if they differ.
        """
        self._ends += 1
        if store.check([f"backwards/apart/{self._ends - 1}"]):
            raise RuntimeError(f"In some micro-batch of the epoch, {_APART}")

    def _end_batch(self) -> None:
        batch, backwards, steps = self._now
        if batch in self._digests:
            return
        digest = zlib.crc32(repr((self._last[1], backwards, steps)).encode())
        self._digests[batch] = digest
        self._last = batch, digest, backwards, steps
        if len(self._digests) > _KEPT:
            self._digests.popitem(last=False)

    def _difference(self, mine: int, counts: Sequence[int], batch: int, digest: int, *theirs: int) -> str:
        """What is wrong, given the micro-batch under way here and the last one that has ended on the next rank."""
        known = self._digests.get(batch)
        if known is not None:
            return "" if known == digest else f"Up to micro-batch {batch} of this run, {_APART}"
        if mine == batch and any(here > there for here, there in zip(counts, theirs, strict=True)):
            return (
                f"In micro-batch {batch} of this run rank {self._rank} has gone backward {counts[0]} times so far, and "
                f"rank {self._next}, which is beyond it, {theirs[0]} times: {_APART}"
            )
        return ""


_APART = (
    "ranks have gone backward, or stepped an optimizer, differently often. Gradients of one step were averaged with "
    "those of another. Let all ranks go backward equally often: weigh by 0 what is to be left out, or let the ranks "
    "agree on a number, by torch.distributed.all_reduce. Gradients may be accumulated without an average, differently "
    "often, inside of trainer.strategy.block_backward_sync() under ulysses_ddp."
)


class CountsBackwards(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _counts: BackwardCounts | None = None

    @property
    def _averages_now(self) -> bool:
        """Whether the next backward averages gradients."""
        return True

    def _look_at_counts(self, store: AnsweringStore) -> None:
        if self._counts is not None:
            self._counts.look(store)

    def _before_batch(self) -> None:
        if self._counts is not None:
            self._counts.begin_batch()
        super()._before_batch()  # type: ignore[misc]  # of `StopsOnSignals`

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._counts is not None and self._averages_now:
            self._counts.count_backward()
        super().pre_backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if self._counts is not None:
            self._counts.count_step()
        return result
