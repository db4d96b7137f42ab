"""A line of what `videoscale doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        status: ``bad`` spoils results or safety, ``slow`` costs time, ``missing`` limits what can be used.
        detail: What was found.
        remedy: What to do about it; empty where nothing needs doing.
    """

    subject: str
    status: Literal["ok", "missing", "slow", "bad"]
    detail: str
    remedy: str = ""
