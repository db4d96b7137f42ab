"""Writes docs/support.md from the record: `python -m tests.support`."""

from __future__ import annotations

from pathlib import Path

from tests.support.page import PAGE, page
from tests.support.record import recorded

(Path(__file__).parents[2] / PAGE).write_text(page(recorded()))
