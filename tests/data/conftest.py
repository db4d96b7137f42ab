"""The same examples on every run, however slow the machine; Lightning's advice on worker counts is left out."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("data", deadline=None, derandomize=True)
settings.load_profile("data")

QUIET = (
    "ignore:The number of training batches",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/data" in item.path.as_posix():
            for message in QUIET:
                item.add_marker(pytest.mark.filterwarnings(message))
