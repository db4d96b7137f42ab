"""Groups of ranks that go backward, or step, differently often are an error, and no gradients of two steps mixed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.failures.backward_counts import BackwardCounts
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.strategies.fsdp2.training import trainer

Ranks = Callable[[int], ProcessPool]


class LeavesOut(RectifiedFlow):
    """Reinforcement learning as many write it: of a rollout's samples those without an advantage are left out.

    Args:
        backwards: In each micro-batch of each group.
        averages: In every backward, or in the last one alone.
    """

    def __init__(self, backwards: tuple[tuple[int, int], ...], averages: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backwards, self.averages = backwards, averages

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:  # type: ignore[override]
        strategy, optimizer = self.trainer.strategy, self.optimizers()
        assert isinstance(strategy, SequenceParallelDDPStrategy)
        count = self.backwards[index][strategy.data_parallel_rank]
        for last in [False] * (count - 1) + [True]:
            with nullcontext() if last or self.averages else strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


def said(backwards: tuple[tuple[int, int], ...], averages: bool, sp: int) -> str:
    runner = trainer(SequenceParallelDDPStrategy(sp), max_epochs=1, max_steps=-1)
    clips = Clips((1, 2, 4), torch.float32, length=len(backwards) * dist.get_world_size() // sp)
    try:
        runner.fit(LeavesOut(backwards, averages), DataLoader(clips, batch_size=1))
    except RuntimeError as error:
        return "\n".join(
            [str(error), *getattr(error, "__notes__", [])]
        )  # where a detector was first, the cause is a note
    return "trained"


EQUAL_IN_ALL = ((3, 2), (2, 3))
"""No collective is left without its pair, so that nothing else would ever tell."""


@pytest.mark.parametrize("sp", [1, 2])
def test_groups_that_go_backward_differently_often_are_an_error(ranks: Ranks, sp: int) -> None:
    for message in ranks(2 * sp).run(said, EQUAL_IN_ALL, True, sp):
        assert "differently often" in message and "block_backward_sync" in message


def test_gradients_that_are_not_averaged_may_be_of_any_number(ranks: Ranks) -> None:
    assert ranks(2).run(said, EQUAL_IN_ALL, False, 1) == ["trained"] * 2
    assert ranks(2).run(said, ((2, 2), (3, 3)), True, 1) == ["trained"] * 2


def counts(rank: int, *batches: tuple[int, int]) -> BackwardCounts:
    """Of a rank of two after micro-batches with so many backwards and steps; the last one is under way."""
    mine = BackwardCounts(rank, 2)
    for backwards, steps in batches:
        mine.begin_batch()
        for _ in range(backwards):
            mine.count_backward()
        for _ in range(steps):
            mine.count_step()
    return mine


def seen(mine: BackwardCounts, other: BackwardCounts) -> str:
    """What the first of two ranks says once both have looked."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True)
    other.look(store)
    mine.look(store)
    return str(store.get("first_error").decode()) if store.check(["first_error"]) else ""


def test_a_rank_that_waits_in_one_more_backward_hears_of_it() -> None:
    message = seen(counts(0, (2, 1), (3, 0)), counts(1, (2, 1), (2, 1), (1, 0)))
    assert message.startswith("rank 0: In micro-batch 2") and "backward 3 times" in message and "2 times" in message
    assert "up to micro-batch 1" in seen(counts(0, (3, 1), (0, 0)), counts(1, (2, 1), (3, 1))).lower()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (((2, 1), (1, 0)), ((2, 1), (2, 1), (1, 0))),  # which is ahead
        (((2, 1), (2, 1), (1, 0)), ((2, 1), (1, 0))),  # which is behind
        (((2, 1), (2, 0)), ((2, 1), (2, 1), (0, 0))),
        ((), ((2, 1), (2, 1))),
    ],
)
def test_a_rank_that_is_slow_is_none_that_left_something_out(mine: Any, theirs: Any) -> None:
    assert seen(counts(0, *mine), counts(1, *theirs)) == ""
    assert seen(counts(0, *theirs), counts(1, *mine)) == ""
