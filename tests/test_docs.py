"""What the pages tell users to write exists: names, arguments, imports, commands."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

import lightning_videoscale as vs
from lightning_videoscale.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("videoscale ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_imports_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("vs."):
                found: object = vs
                for name in ast.unparse(node).split(".")[1:]:
                    found = getattr(found, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_videoscale"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(str(node.module)), alias.name), alias.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 3
