"""Records what a device is to do, in CUDA graphs: `Recorder`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from lightning_videoscale.compat.torch.graphs import end_allocation


class Recorder:
    """Records graphs one behind the other, on a stream of its own and in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._other = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_warm = False

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Inside, work goes to the recorder's stream, behind all work so far."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            if not self._is_warm:
                self._warm_up()
            yield
        torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Has cuBLAS take its workspace of the stream, once and not from the pool."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.ones(16, 16, device=self._stream.device, dtype=dtype)
            torch.nn.functional.linear(x, x, x[0])
            x @ x
        torch.cuda.synchronize()
        self._is_warm = True

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, work is done now and not recorded, in memory that is not of the pool; it is complete afterwards."""
        with torch.cuda.stream(self._other):
            yield
        self._other.synchronize()

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begins a graph."""
        self._graph = torch.cuda.CUDAGraph()
        # Relaxed, since a graph of backward ends in a thread of the autograd engine.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        return self._graph

    def end(self) -> None:
        """Ends the graph."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()

    def repeat(self, call: Callable[[], object]) -> Callable[[], None]:
        """Returns what does again, by a graph, what a call does on the device; what the call returns is lost."""
        with self.stream(), self.recording() as graph:
            call()
        return graph.replay

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Inside, kernels are recorded rather than run; the graph may end, and others begin, inside."""
        try:
            yield self.begin()
            self.end()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Leaves allocator and generators as they were before a capture that was broken."""
        graph, self._graph = self._graph, None
        with suppress(RuntimeError):  # which says less than what broke the capture
            if graph is not None:
                graph.capture_end()
        end_allocation(self._stream.device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph is empty
            empty = torch.cuda.CUDAGraph()  # generators believe in a capture until the next one ends
            empty.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            empty.capture_end()
