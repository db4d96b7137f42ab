"""A capture that fails on one rank leaves all ranks eager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_videoscale.graphs.graphed_network import capture_together


class Votes:
    """Ranks, each a thread, that ask together whether all say yes."""

    def __init__(self, ranks: int) -> None:
        self._met, self._said = threading.Barrier(ranks, timeout=10), [True] * ranks

    def of(self, rank: int) -> Callable[[bool], bool]:
        def agree(yes: bool) -> bool:
            self._said[rank] = yes
            self._met.wait()
            return all(self._said)

        return agree


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: operation not permitted\nmore"), TypeError("no")])
def test_ranks_without_an_error_learn_of_it(error: Exception) -> None:
    votes, attempts = Votes(3), []

    def on_rank(rank: int) -> str | None:
        def attempt() -> None:
            attempts.append(rank)
            if rank == 1:
                raise error

        return capture_together(attempt, votes.of(rank))

    with ThreadPoolExecutor(3) as ranks:
        reasons = list(ranks.map(on_rank, range(3)))
    assert sorted(attempts) == [0, 1, 2]
    assert reasons[0] == reasons[2] == "its capture failed on another rank"
    first_line = str(error).partition("\n")[0]
    assert reasons[1] == f"its capture failed: {type(error).__name__}: {first_line}"


def test_where_all_can_all_replay() -> None:
    assert capture_together(lambda: None, bool) is None


def test_an_interrupt_is_no_failed_capture() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_together(interrupted, bool)
