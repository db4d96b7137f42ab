"""The documentation as a site: every page has its place, every link leads somewhere, every public name has an entry."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import lightning_videoscale as vs

ROOT = Path(__file__).parents[1]


def built(folder: Path, *, with_reference: bool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site; strict, so that a page without a place or a broken link is an error."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)  # where mkdocstrings looks for the package
    plugins = {} if with_reference else {"plugins": ["search"]}
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **plugins))
    return folder


@pytest.fixture
def pages() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("site_pages")
    finally:
        sys.path.pop(0)


def test_pages_have_places_and_links_lead_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = built(tmp_path, with_reference=False, monkeypatch=monkeypatch)
    home = (site / "index.html").read_text()
    assert 'href="data/"' in home and 'src="figures/demo-planned.png"' in home
    cli = (site / "reference" / "cli" / "index.html").read_text()
    assert "videoscale encode" in cli and "--text-encoder" in cli


def test_every_room_lists_what_it_exports(pages: ModuleType) -> None:
    public = {name for name in vs.__all__ if isinstance(getattr(vs, name), ModuleType)}
    assert public <= set(pages.ROOMS)
    for room in pages.ROOMS:
        package = importlib.import_module(f"lightning_videoscale.{room}")
        listed = list(pages.exported(room))
        assert [path.rsplit(".", 1)[1] for path in listed] == list(package.__all__)
        for path in listed:
            module, name = f"lightning_videoscale.{path}".rsplit(".", 1)
            assert getattr(importlib.import_module(module), name) is getattr(package, name)


@pytest.mark.full
def test_every_public_name_has_an_entry(
    tmp_path: Path, pages: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        site = built(tmp_path, with_reference=True, monkeypatch=monkeypatch)
    assert not [record for record in caplog.records if record.name.startswith(("mkdocs", "griffe"))]
    for room in pages.ROOMS:
        entries = re.findall(r'id="([\w.]+)"', (site / "reference" / room / "index.html").read_text())
        assert {f"lightning_videoscale.{path}" for path in pages.exported(room)} <= set(entries)
