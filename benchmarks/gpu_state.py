"""How fast, hungry and hot a GPU is while something runs on it, as nvidia-smi says."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

_FIELDS = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_PAUSE = 0.3  # seconds between samples


class GpuState:
    """Samples the current GPU in the background while it is open: clock, power and temperature. Without one, nothing.

    Attributes:
        turns: By name, what every `watch` of it saw: medians of ``sm_mhz``, ``watts`` and ``celsius``.
    """

    def __init__(self) -> None:
        self.turns: dict[str, list[dict[str, float]]] = {}
        self._samples: list[tuple[float, list[float]]] = []
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> GpuState:
        if torch.cuda.is_available():
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._reader.is_alive():
            self._reader.join()

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Adds to ``turns[name]`` the medians of the samples that come while it is open."""
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        seen = [values for at, values in list(self._samples) if begin <= at <= end]
        if seen:
            medians = (round(statistics.median(values), 1) for values in zip(*seen, strict=True))
            self.turns.setdefault(name, []).append(dict(zip(_FIELDS, medians, strict=True)))

    def _read(self) -> None:
        gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        query = ("nvidia-smi", "-i", gpu, f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits")
        while not self._closed.wait(_PAUSE):
            line = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
            try:
                self._samples.append((time.perf_counter(), [float(value) for value in line.split(",")]))
            except ValueError:
                print(f"nvidia-smi does not tell the state of {gpu}: {line.strip()}", file=sys.stderr)
                return
