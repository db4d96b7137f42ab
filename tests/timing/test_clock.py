"""The clock on scripted marks, whose times are known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from lightning_videoscale.timing import Marks, StepClock, StepTimes, add_up


class ScriptedMarks(Marks):
    """A mark is the time of a device that lags behind its host, as GPUs do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device_is_at = 0.0
        self.waits: list[float] = []
        self.released: list[float] = []

    def set(self) -> float:
        return self.now

    def is_past(self, mark: float) -> bool:
        return mark <= self.device_is_at

    def wait_for(self, mark: float) -> None:
        self.waits.append(mark)
        self.device_is_at = max(self.device_is_at, mark)

    def seconds(self, begin: float, end: float) -> float:
        assert max(begin, end) <= self.device_is_at, "an event that has not happened has no time"
        return end - begin

    def release(self, marks: Iterable[float]) -> None:
        self.released += marks


@pytest.fixture
def marks() -> ScriptedMarks:
    return ScriptedMarks()


def micro_batch(clock: StepClock, marks: ScriptedMarks) -> None:
    """1 s of other, 2 s of data, forward of 3 + 5 s with 4 s of exchange in it, backward, waiting, optimizer."""

    def taking(seconds: float) -> None:
        marks.now += seconds

    taking(1)
    clock.enter("data")
    taking(2)
    clock.enter("forward")
    taking(3)
    clock.timing(taking, "exchange")(4)
    taking(5)
    clock.enter("backward")
    taking(6)
    clock.timing(lambda: clock.timing(taking, "wait")(7), "wait")()  # one call that waits within another
    clock.enter("wait")
    taking(8)
    clock.enter("optimizer")
    taking(9)
    clock.end_micro_batch()


EXPECTED = StepTimes(data=2, forward=8, backward=6, wait=15, exchange=4, optimizer=9, other=1)


def test_every_second_is_told_apart(marks: ScriptedMarks) -> None:
    clock = StepClock(marks)
    micro_batch(clock, marks)
    [times] = clock.read()
    assert times == EXPECTED
    assert times.compute == 14
    assert times.total == marks.now == 45


def test_micro_batches_add_up(marks: ScriptedMarks) -> None:
    clock = StepClock(marks)
    for _ in range(3):
        micro_batch(clock, marks)
    times = clock.read()
    assert times == [EXPECTED] * 3
    assert add_up(times) == StepTimes(*(3 * value for value in EXPECTED))
    assert clock.read() == []


def test_nothing_waits_for_the_device_until_somebody_reads(marks: ScriptedMarks) -> None:
    clock = StepClock(marks)
    micro_batch(clock, marks)
    micro_batch(clock, marks)
    marks.device_is_at = 50.0
    micro_batch(clock, marks)
    assert marks.waits == []
    assert len(marks.released) == 10, "the marks of what is past are used again without being asked for"
    assert clock.read() == [EXPECTED] * 3
    assert marks.waits == [3 * 45]


def test_calls_outside_of_forward_and_backward_are_not_phases(marks: ScriptedMarks) -> None:
    """The gathers and exchanges of a validation belong to it."""
    clock = StepClock(marks)

    def validate() -> str:
        marks.now += 1.0
        return "done"

    assert clock.timing(validate, "wait")() == "done"
    assert clock.timing(validate, "wait", within=["other"])() == "done"
    clock.end_micro_batch()
    assert clock.read() == [StepTimes(other=1.0, wait=1.0)]


def test_a_call_that_fails_ends_its_phase(marks: ScriptedMarks) -> None:
    clock = StepClock(marks)

    def fail() -> None:
        marks.now += 1.0
        raise OSError("the link is down")

    clock.enter("forward")
    with pytest.raises(OSError, match="the link is down"):
        clock.timing(fail, "exchange")()
    marks.now += 2.0
    clock.end_micro_batch()
    assert clock.read() == [StepTimes(exchange=1.0, forward=2.0)]
