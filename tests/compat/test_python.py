"""The stack of a thread, read by another: whatever that thread and native ones do meanwhile, the process goes on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.python import ThreadStack

LOOKING = """
import contextlib, ctypes, sys, threading, time
from lightning_videoscale.compat.python import ThreadStack

def look(stack, pause, is_over):
    while not is_over.is_set():
        assert '  File ' in stack.read()  # of the innermost hundred frames
        time.sleep(pause)

@contextlib.contextmanager
def looked_at(seconds, pause=0.0):
    sys.setswitchinterval(1e-5)
    is_over = threading.Event()
    thread = threading.Thread(target=look, args=(ThreadStack(), pause, is_over))
    thread.start()
    end = time.monotonic() + seconds
    yield lambda: time.monotonic() < end
    is_over.set()
    thread.join()
"""

NATIVE_THREADS = """
libc = ctypes.CDLL(None)
python = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)  # makes the thread that calls it known to Python
with looked_at(3) as goes_on:
    while goes_on():
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            assert libc.pthread_create(ctypes.byref(thread), None, python, None) == 0
        for thread in threads:
            libc.pthread_join(thread, None)
"""

TRACING = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, scale):
        for _ in range(3):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * scale
        return x

plain = False
with looked_at(40, pause=0.0003) as goes_on:
    while goes_on():
        plain = not plain
        torch._dynamo.reset()
        block = torch.compile(Block(), backend="aot_eager", fullgraph=True)
        for samples in (4, 5, 6):
            x = torch.randn(samples, 16, requires_grad=True)
            y = block(x, 2.0) if plain else checkpoint(block, x, 2.0, use_reentrant=False)
            y.sum().backward()
"""


@pytest.mark.parametrize(
    "work", [NATIVE_THREADS, pytest.param(TRACING, marks=pytest.mark.full)], ids=["native", "traces"]
)
def test_a_process_whose_main_thread_is_looked_at_goes_on(work: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOOKING + work], capture_output=True, text=True, timeout=140)
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]


def test_frames_are_told_from_the_innermost_on() -> None:
    stack, begun, seen = ThreadStack(), threading.Event(), []

    def look() -> None:
        begun.wait()
        seen.append(stack.read())

    def outer() -> None:
        def inner() -> None:
            begun.set()
            thread.join()

        inner()

    thread = threading.Thread(target=look)
    thread.start()
    outer()
    names = [line.rpartition(" in ")[2] for line in seen[0].splitlines() if line.startswith("  File ")]
    assert names.index("inner") < names.index("outer") < names.index("test_frames_are_told_from_the_innermost_on")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="as of 3.13 it is not needed")
def test_a_build_that_lacks_the_function_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "pythonapi", SimpleNamespace())
    with pytest.raises(MissingNameError, match=r"_Py_DumpTraceback.*3\.11\.7 and 3\.12\.1"):
        ThreadStack()
