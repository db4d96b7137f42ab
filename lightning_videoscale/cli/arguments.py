"""What several commands ask for in the same way."""

from __future__ import annotations

import argparse
import os


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def positive(text: str) -> int:
    """An integer of at least one.

    Raises:
        argparse.ArgumentTypeError: If it is not.
    """
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
