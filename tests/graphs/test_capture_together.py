"""A capture that fails on one rank leaves all ranks eager, and all know why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_videoscale.graphs.capture_together import Captured, capture_together


class Meeting:
    """Ranks, each a thread, that tell each other what they have."""

    def __init__(self, ranks: int) -> None:
        self._met, self._said = threading.Barrier(ranks, timeout=10), [None] * ranks

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._said[rank] = mine
            self._met.wait()
            return list(self._said)

        return gather


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted\nmore"), TypeError("no"), ValueError()])
def test_all_ranks_learn_why_one_cannot(error: Exception) -> None:
    meeting, attempts = Meeting(3), []

    def on_rank(rank: int) -> list[Captured]:
        def attempt() -> Captured:
            attempts.append(rank)
            if rank == 1:
                raise error
            return Captured(None)

        return capture_together(attempt, meeting.of(rank))

    with ThreadPoolExecutor(3) as ranks:
        told = list(ranks.map(on_rank, range(3)))
    assert sorted(attempts) == [0, 1, 2]
    assert told[0] == told[1] == told[2]
    before, reason, after = (theirs.failure for theirs in told[0])
    assert before is None and after is None
    assert reason is not None and type(error).__name__ in reason and str(error).partition("\n")[0] in reason
    assert "more" not in reason


def test_what_a_rank_has_captured_is_told() -> None:
    mine = Captured(None, "they take 9.0 GiB", True)
    assert capture_together(lambda: mine, lambda told: [told, Captured(None)]) == [mine, Captured(None)]


def test_an_interrupt_is_no_failed_capture() -> None:
    def interrupted() -> Captured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_together(interrupted, lambda mine: [mine])
