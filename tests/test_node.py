"""A table that is given up leaves nothing behind, whether it listens or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import node

SLEEPS = """
import signal, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    open(sys.argv[1], "a").write("x")
    time.sleep(0.05)
"""


@pytest.mark.parametrize("hearing", ["deaf", "listens"])
def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearing: str) -> None:
    monkeypatch.setattr(node, "SECONDS_TO_END", 1.0)
    beats = tmp_path / "beats"
    begin = time.monotonic()
    assert not node._runs([sys.executable, "-c", SLEEPS, str(beats), hearing], 1.0)
    assert time.monotonic() - begin < 20
    count = beats.stat().st_size
    assert count > 0
    time.sleep(0.3)
    assert beats.stat().st_size == count
