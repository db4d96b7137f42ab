"""How long the host is in the clock's code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_videoscale.timing.clock import StepClock


class HostTime:
    """Seconds that the host spends in the clock while this is open, up to the last call of `take`."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._originals = {name: getattr(StepClock, name) for name in ("enter", "end_micro_batch")}

    def __enter__(self) -> HostTime:
        for name, call in self._originals.items():
            setattr(StepClock, name, self._timed(call))
        return self

    def __exit__(self, *error: object) -> None:
        for name, call in self._originals.items():
            setattr(StepClock, name, call)

    def take(self) -> float:
        """Seconds since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            begin = time.perf_counter()
            call(*arguments)
            self._spent += time.perf_counter() - begin

        return timed
