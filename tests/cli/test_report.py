"""`videoscale report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_videoscale.cli import main
from tests.report.simulated import log_run


def test_draws_the_page_beside_the_log_or_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_run(tmp_path, dp_size=2, steps=10)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "10 steps in" in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path / "run_log.jsonl"), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    (tmp_path / "pages").mkdir()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "pages")]) == 0
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["report.html"]


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_run(tmp_path / "version_7", dp_size=1, steps=2)
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "No run_log.jsonl" in error and "version_7" in error
    assert main(["report", str(tmp_path / "version_8")]) == 1
    error = capsys.readouterr().err
    assert "version_8: there is no such folder" in error and str(Path.cwd()) in error
    assert main(["report", str(tmp_path / "version_7"), "--output", str(tmp_path / "no" / "such" / "page.html")]) == 1
    assert "page.html" in capsys.readouterr().err
