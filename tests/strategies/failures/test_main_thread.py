"""Where the main thread is, told by another: also while `torch.compile` traces there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from lightning_videoscale.strategies.failures.main_thread import line_of_main_thread

TRACING = """
import sys, threading, time
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from lightning_videoscale.strategies.failures.main_thread import line_of_main_thread

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, scale):
        for _ in range(3):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * scale
        return x

def look():
    while True:
        line_of_main_thread()
        time.sleep(0.0003)

sys.setswitchinterval(1e-4)
threading.Thread(target=look, daemon=True).start()
end = time.monotonic() + 40
plain = False
while time.monotonic() < end:
    plain = not plain
    torch._dynamo.reset()
    block = torch.compile(Block(), backend="aot_eager", fullgraph=True)
    for samples in (4, 5, 6):
        x = torch.randn(samples, 16, requires_grad=True)
        y = block(x, 2.0) if plain else checkpoint(block, x, 2.0, use_reentrant=False)
        y.sum().backward()
"""


def seen_by_a_thread(work: Callable[[threading.Event], object]) -> str:
    """What `line_of_main_thread` returns on another thread while this one does ``work``, which sets the event."""
    begun, lines = threading.Event(), []

    def look() -> None:
        begun.wait()
        lines.append(line_of_main_thread())

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
    assert line.startswith("test_main_thread.py:") and line.endswith(" in object_hook")


def test_it_is_told_on_the_main_thread_itself() -> None:
    assert line_of_main_thread().endswith(" in test_it_is_told_on_the_main_thread_itself")


@pytest.mark.full
def test_a_main_thread_that_traces_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", TRACING], capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr[-2000:]
