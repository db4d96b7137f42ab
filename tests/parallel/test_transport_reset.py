"""`reset` of the symmetric transport, on threads that stand for ranks and streams: back in step after an exception."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_videoscale.parallel import Axis
from lightning_videoscale.parallel.transport.draining import drain
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from tests.parallel.exact_layers import CALLS, DisturbedTransport, ExactLayers, failure_after
from tests.parallel.ranks_on_threads import PATIENCE, ThreadInterconnect, axis_of, on_threads

DEPTH = 3


def is_as_at_first(transport: SymmetricTransport) -> bool:
    """No exchange is pending, no piece has arrived, and all slots are released."""
    flags = [slot.memory.flags for slot in transport._known]
    return all(slot.pending is None for slot in transport._known) and all(
        each.tolist() == [0] * (len(each) // 2) + [1] * (len(each) // 2) for each in flags
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("everyone", [False, True])
def test_layers_are_exact_after_steps_that_failed(size: int, everyone: bool) -> None:
    """One rank raises in the middle of a step, or each of them somewhere; a device waits for what never comes.

    When the host raises, devices are still at the whole step before, which stays exact.
    """
    draws = random.Random(size)
    plans = [
        {rank: draws.randrange(DEPTH * CALLS) for rank in (range(size) if everyone else [draws.randrange(size)])}
        for _ in range(8)
    ]
    looked = threading.Barrier(size, timeout=PATIENCE)

    def work(transport: DisturbedTransport, rank: int) -> tuple[list[bool], list[bool]]:
        layers, interconnect = ExactLayers(axis_of(rank, size), DEPTH), transport._interconnect
        assert isinstance(interconnect, ThreadInterconnect)
        failed, as_at_first = [], []

        def attempt(calls: int | None) -> None:
            transport.disturbance = failure_after(calls)
            try:
                layers.run(layers.mine(inputs), transport)
            finally:
                transport.disturbance = lambda: None

        for number, plan in enumerate([None, *plans]):
            inputs = layers.draw(number)
            if plan is not None:
                # The host does not wait for them.
                before = interconnect.stream.submit(layers.are_wrong, inputs, transport)
                step = interconnect.stream.submit(attempt, plan.get(rank))
                transport.reset()
                assert not before.result(0)
                failed.append(isinstance(step.exception(0), torch.OutOfMemoryError))
                as_at_first.append(is_as_at_first(transport))
                looked.wait()  # or a peer might have begun the next step
            taken = transport.memory_bytes
            assert not layers.are_wrong(inputs, transport)
            assert plan is None or transport.memory_bytes == taken > 0
        return failed, as_at_first

    for rank, (failed, as_at_first) in enumerate(on_threads(size, work, kind=DisturbedTransport)):
        assert failed == [rank in plan for plan in plans]
        assert as_at_first == [True] * 8


class _Late(ThreadInterconnect):
    """Rank 0 goes on late from an exchange of all ranks."""

    def agree(self, told: Any, axis: Axis, purpose: str) -> list[Any]:
        everyone = super().agree(told, axis, purpose)
        if self._rank == 0:
            time.sleep(0.05)
        return everyone


def test_exchanges_that_were_pending_are_refused() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[float]:
        axis = axis_of(rank, 2)
        pending = [transport.open(torch.ones(4), [2, 2], [2, 2], axis) for _ in range(3)]
        pending.append(transport.begin(torch.empty(0), [2, 2], [2, 2], axis))
        if rank == 0:  # whose peer has begun the same and raised
            pending[0].send(1)
            pending[1].send(0, 1)
        transport.reset()
        for exchange in pending:
            with pytest.raises(RuntimeError, match=r"ulysses axis, of slot \d, is not pending"):
                exchange.send(1)
            with pytest.raises(RuntimeError, match=r"ulysses axis, of slot \d, is not pending"):
                transport.wait(exchange)
        result: list[float] = transport.exchange(torch.arange(4.0) + 10 * rank, [2, 2], [2, 2], axis).tolist()
        return result

    assert on_threads(2, work, interconnect=_Late) == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


@pytest.mark.parametrize(("step", "first", "second", "kept"), [("agree", 100, 1, 1024), ("allocate", 1, 100, 0)])
def test_what_only_one_rank_has_is_dropped(step: str, first: int, second: int, kept: int) -> None:
    """Rank 1 raises when it has told a message's sizes, or has taken memory for it, which rank 0 then has alone."""

    def work(transport: SymmetricTransport, rank: int) -> list[int]:
        axis, interconnect = axis_of(rank, 2), transport._interconnect

        def begin(size: int) -> Any:
            return transport.all_to_all(torch.full((2 * size,), rank), [size] * 2, [size] * 2, axis)

        def interrupted(*args: Any) -> Any:
            getattr(ThreadInterconnect, step)(interconnect, *args)
            raise torch.OutOfMemoryError("injected")

        transport.wait(begin(first))
        if rank == 0:
            begin(second)
        else:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(interconnect, step, interrupted)
                begin(second)
        transport.reset()
        taken = [transport.memory_bytes]
        for size in (second, first):
            assert transport.wait(begin(size)).tolist() == [0] * size + [1] * size
        return [*taken, transport.memory_bytes]

    assert on_threads(2, work) == [[kept, 1024]] * 2  # a slot for 100 numbers of 8 bytes, on 256


def test_what_a_graph_of_one_rank_alone_still_has_goes_with_the_graph() -> None:
    def work(transport: SymmetricTransport, rank: int) -> list[int]:
        axis, interconnect = axis_of(rank, 2), transport._interconnect

        def exchange(size: int) -> None:
            transport.exchange(torch.full((2 * size,), rank), [size] * 2, [size] * 2, axis)

        def interrupted(*args: Any) -> Any:
            ThreadInterconnect.allocate(interconnect, *args)  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("injected")

        exchange(1)
        held = transport.places if rank == 0 else ()
        if rank == 0:
            transport.all_to_all(torch.zeros(200, dtype=torch.int64), [100] * 2, [100] * 2, axis)
        else:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(interconnect, "allocate", interrupted)
                exchange(100)
        transport.reset()
        after_reset = transport.memory_bytes
        transport.close()
        closed = transport.memory_bytes
        del held
        return [after_reset > 0, closed > 0, transport.memory_bytes, len(transport._known)]

    assert on_threads(2, work) == [[True, True, 0, 0], [False, False, 0, 0]]


def test_who_does_not_come_is_named() -> None:
    def work(transport: SymmetricTransport, rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(TimeoutError) as error:
            transport.reset()
        return str(error.value)

    for message in on_threads(3, work, timeout=0.2)[::2]:
        assert "0:00:00.2" in message and "ranks [11] of the ulysses axis" in message and "`reset`" in message


class _Failed(ThreadInterconnect):
    def drain(self, release: Any) -> str | None:
        return "its device has failed (CUDA error)" if self._rank == 1 else super().drain(release)


def test_a_failed_device_is_an_error_on_all_ranks() -> None:
    def work(transport: SymmetricTransport, rank: int) -> str:
        with pytest.raises(RuntimeError) as error:
            transport.reset()
        return str(error.value)

    for message in on_threads(3, work, interconnect=_Failed):
        assert "(10, 11, 12) of the ulysses axis" in message
        assert "rank 11: its device has failed (CUDA error)" in message
        assert "rank 10:" not in message and "rank 12:" not in message


def test_a_device_comes_to_rest_or_it_says_why() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: assertion")

    soon = timedelta(seconds=0.05)
    assert "CUDA error: assertion" in str(drain(fail, lambda: None, soon))
    assert "0:00:00.05" in str(drain(lambda: time.sleep(0.5), lambda: None, soon))
    calls: list[str] = []

    def wait() -> None:
        while calls.count("release") < 3:
            time.sleep(0.001)
        calls.append("rest")

    assert drain(wait, lambda: calls.append("release"), timedelta(seconds=PATIENCE)) is None
    assert calls[-1] == "rest" and calls.count("rest") == 2  # the flags that were set last are waited for, too
