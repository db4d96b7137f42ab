"""The notebook's cells run, with fewer steps, and show what the text says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.conftest import EXAMPLES

NOTEBOOK = EXAMPLES / "first_steps.ipynb"
FEWER = {"max_steps=500": "max_steps=2", "steps=24)": "steps=2)", "log_every_n_steps=5": "log_every_n_steps=1"}


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    script = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    for written, fewer in FEWER.items():
        assert written in script
        script = script.replace(written, fewer)
    names = {"__name__": "__main__"}
    exec(compile(script, str(NOTEBOOK), "exec"), names)
    gaps = {balance: np.ptp(names["plan_of"](balance), axis=1).sum() for balance in ("equal_token", "planned")}
    assert gaps["planned"] < gaps["equal_token"], "as the picture shows"
    assert Image.open(tmp_path / "first_steps" / "plan.png").width > 500
    assert Image.open(tmp_path / "first_steps" / "sample.png").size == (720, 288)
    assert re.search(r"report\.html \d+ kB", capsys.readouterr().out)


def test_it_is_kept_without_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in content["cells"])
    texts = "".join("".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)]+)\)", texts):
        assert (EXAMPLES / target).resolve().is_file(), target
