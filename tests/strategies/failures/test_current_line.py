"""The line that a thread executes, told by another."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from lightning_videoscale.compat.python import ThreadStack
from lightning_videoscale.strategies.failures.current_line import line_of


def seen_by_a_thread(work: Callable[[threading.Event], object]) -> str:
    """What `line_of` returns on another thread while this one does ``work``, which sets the event."""
    stack, begun, lines = ThreadStack(), threading.Event(), []

    def look() -> None:
        begun.wait()
        lines.append(line_of(stack))

    thread = threading.Thread(target=look)
    thread.start()
    work(begun)
    thread.join()
    return lines[0]


def test_the_innermost_line_of_the_users_is_told() -> None:
    def calls_a_library(begun: threading.Event) -> None:
        def object_hook(_: dict[str, object]) -> None:
            begun.set()
            threading.Event().wait(0.3)  # the innermost lines are those of `threading`

        json.loads("{}", object_hook=object_hook)

    line = seen_by_a_thread(calls_a_library)
    assert line.startswith("test_current_line.py:") and line.endswith(" in object_hook")


def test_a_thread_tells_its_own_line() -> None:
    assert line_of(ThreadStack()).endswith(" in test_a_thread_tells_its_own_line")


def test_the_line_of_a_thread_that_has_ended_is_unknown() -> None:
    stacks: list[ThreadStack] = []
    thread = threading.Thread(target=lambda: stacks.append(ThreadStack()))
    thread.start()
    thread.join()
    assert line_of(stacks[0]) == "an unknown line"
