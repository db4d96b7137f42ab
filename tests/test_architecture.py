"""Who imports whom: the table of rooms in docs/architecture.md, held against every import in the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_videoscale"
ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(?P<room>[\w/]+)` \|(?P<rooms>[^|]*)\| (?P<lightning>yes|no) \|$", re.MULTILINE)
TABLE = list(ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))

ALLOWED = {row["room"]: set(re.findall(r"`(\w+)`", row["rooms"])) for row in TABLE}
"""By room, the other rooms that it may import."""

PLAIN = {row["room"] for row in TABLE if row["lightning"] == "no"}
"""Rooms that know nothing of Lightning."""


def imported(source: str) -> Iterator[str]:
    """The dotted name of everything that a file imports, at its top, in functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(source: str, folder: str) -> list[str]:
    """What a file in a folder of the package must not import; ``data/planning`` is held to the row ``data`` too."""
    rows = [room for room in ALLOWED if f"{folder}/".startswith(f"{room}/")]
    own = folder.partition("/")[0]
    found = []
    for name in imported(source):
        package, room, *_ = *name.split("."), ""
        if package == PACKAGE and room != own and any(room not in ALLOWED[row] for row in rows):
            found.append(name)
        if package in ("lightning", "pytorch_lightning") and not PLAIN.isdisjoint(rows):
            found.append(name)
    return found


def rooms() -> list[str]:
    """The folders of the package, and the modules beside them."""
    entries = [
        entry for entry in (ROOT / PACKAGE).iterdir() if entry.name not in ("csrc", "__init__.py", "__pycache__")
    ]
    return sorted(entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py")


def test_the_table_names_every_room() -> None:
    assert sorted(room for room in ALLOWED if "/" not in room) == rooms()
    assert set.union(*ALLOWED.values()) <= set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_what_the_table_allows(room: str) -> None:
    home = ROOT / PACKAGE / room
    files = {file: file.relative_to(home.parent).parent.as_posix() for file in home.glob("**/*.py")}
    files = files or {home.with_suffix(".py"): room}
    found = {str(file): names for file, folder in files.items() if (names := violations(file.read_text(), folder))}
    assert not found, "correct these imports, or the table in docs/architecture.md"


@pytest.mark.parametrize(
    ("folder", "source", "found"),
    [
        ("data", "def f():\n    from lightning_videoscale.callbacks import LossWeighting", ["callbacks.LossWeighting"]),
        ("metrics", "if TYPE_CHECKING:\n    import lightning_videoscale.data.geometry", ["data.geometry"]),
        ("cost", "from lightning_videoscale import data", ["data"]),
        ("parallel/transport", "from lightning_videoscale import VideoDataModule", ["VideoDataModule"]),
        ("data/planning", "from lightning_videoscale.timing import StepTimer", ["timing.StepTimer"]),
        ("data/benchmark", "from lightning_videoscale.timing import StepTimer", []),
        ("kernels/triton", "from lightning_videoscale.kernels import head_types", []),
    ],
)
def test_a_forbidden_import_is_found(folder: str, source: str, found: list[str]) -> None:
    assert violations(source, folder) == [f"{PACKAGE}.{name}" for name in found]


def test_lightning_stays_at_the_rim() -> None:
    assert violations("import lightning.pytorch as pl", "data/planning") == ["lightning.pytorch"]
    assert violations("import lightning.pytorch as pl", "data") == []
