"""Lightning's advice on worker counts and the like says nothing about these tests."""

import pytest

QUIET = (
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:The number of training batches",
    "ignore:GPU available but not used",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/callbacks" in item.path.as_posix():
            for message in QUIET:
                item.add_marker(pytest.mark.filterwarnings(message))
