"""A store on rank 0 that is asked with a limit: `AnsweringStore`.

torch's client waits for an answer as long as the connection stands. A machine that has lost its power or its network
closes none, so that whoever asks it would wait for ever, and with it those who ask the same client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but missing from the type hints


class AnsweringStore:
    """A thread asks the store, one question after the other; any thread may have it ask.

    Every method is that of ``torch.distributed.TCPStore``, and raises a ``DistNetworkError`` if no answer has come
    within `patience`. From then on all do, also those that wait.

    Args:
        store: Is asked by nobody else.
        patience: Seconds that an answer may take.

    Attributes:
        patience: As given; what is set later counts for later questions.
    """

    def __init__(self, store: TCPStore, patience: float) -> None:
        self.patience = patience
        self._store = store
        self._questions: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_lost = False
        threading.Thread(target=self._ask_one_by_one, name="answering-store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Sets a value."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Returns a value that is there."""
        value: bytes = self._ask(self._store.get, key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns several of them."""
        values: list[bytes] = self._ask(self._store.multi_get, list(keys))
        return values

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all of these are there."""
        return bool(self._ask(self._store.check, list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns it."""
        return int(self._ask(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a value if it is what was expected, and returns what it is."""
        value: bytes = self._ask(self._store.compare_set, key, expected, desired)
        return value

    def close(self) -> None:
        """Ends the thread, unless it waits for an answer that does not come."""
        self._lose("is closed")

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_lost:
                raise dist.DistNetworkError("The store on rank 0 does not answer.")
            self._waiting.add(answer)
        self._questions.put((answer, question, args))
        try:
            return answer.result(self.patience)
        except TimeoutError:
            self._lose(f"has not answered for {self.patience:.0f} s")
            return answer.result()
        finally:
            with self._lock:
                self._waiting.discard(answer)

    def _lose(self, why: str) -> None:
        with self._lock:
            self._is_lost = True
            waiting = list(self._waiting)
        for answer in waiting:
            with suppress(InvalidStateError):  # it came in between
                answer.set_exception(dist.DistNetworkError(f"The store on rank 0 {why}."))
        self._questions.put((Future(), lambda: None, ()))  # which ends the thread

    def _ask_one_by_one(self) -> None:
        while not self._is_lost:
            answer, question, args = self._questions.get()
            try:
                result, error = question(*args), None
            except Exception as raised:
                result, error = None, raised
            with suppress(InvalidStateError):  # nobody waits any more
                answer.set_result(result) if error is None else answer.set_exception(error)
