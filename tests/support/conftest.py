"""`pytest tests/support -m full --record-support HEAD` writes what each cell came to into `results.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version

import pytest

from tests.gpu.recording import ROOT, head
from tests.support.page import PAGE
from tests.support.record import RESULTS, Cell, add

PACKAGES = ("torch", "diffusers", "lightning", "deepspeed", "peft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-support", metavar="COMMIT", help="write results.jsonl: what each cell came to")


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[Cell], None] | None:
    """Writes a cell with its provenance; None where nothing is to be recorded."""
    commit = request.config.getoption("--record-support", default=None)  # not known when this folder was not named
    if commit is None:
        return None
    where = {
        "commit": head(self_made=[RESULTS, ROOT / PAGE]) if commit == "HEAD" else commit,
        "date": datetime.now(UTC).date().isoformat(),
        **{name: version(name) for name in PACKAGES},
    }
    return lambda cell: add([replace(cell, provenance=where)])
