"""Something that is made in the background, while something else goes on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class InBackground(Generic[T]):
    """Begins to make something, named for messages, in a thread, which ends with the process whatever it does."""

    def __init__(self, make: Callable[[], T], what: str) -> None:
        self._make, self._what = make, what
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Waits until it is made, and returns it.

        Raises:
            RuntimeError: If it could not be made; its cause is the error of the background.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"{self._what} could not be made in the background: {self._error!r}") from self._error
        return self._made[0]

    def _run(self) -> None:
        try:
            self._made.append(self._make())
        except BaseException as error:
            self._error = error
