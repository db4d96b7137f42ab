"""The record of the last run on GPUs: what is counted, what a run of some files replaces, and the committed file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.recording import RESULT, Recording, merged

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_right(): pass

def test_wrong(): assert False

@pytest.mark.parametrize("gpus", [2, 4])
def test_on_many(gpus): pytest.skip(f"needs {gpus} GPUs")

@pytest.mark.skip(reason="needs 4 GPUs")
def test_on_four(): pass
"""


def run_on(gpus: int, commit: str, files: dict[str, int]) -> dict[str, Any]:
    """A run with the number of tests that passed in each file."""
    return {"commit": commit, "machine": {"gpu": "H200", "gpus": gpus}, "files": files}


def test_a_session_is_recorded_by_file(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(test_some=TESTS, test_one="def test_it(): pass")
    result = tmp_path / "result.json"
    pytester.runpytest_inprocess(plugins=[Recording("a" * 40, result)])
    (run,) = json.loads(result.read_text())["runs"]
    assert run["commit"] == "a" * 40 and list(run["files"]) == ["test_one.py", "test_some.py"]
    some = run["files"]["test_some.py"]
    assert (some["passed"], some["failed"]) == (1, ["test_wrong"])
    assert some["skipped"] == {"needs 2 GPUs": 1, "needs 4 GPUs": 2}


def test_a_session_that_was_cut_short_is_not_recorded(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(test_some=TESTS)
    pytester.runpytest_inprocess("-x", plugins=[Recording("a" * 40, tmp_path / "result.json")])
    assert not (tmp_path / "result.json").exists()


def test_a_run_replaces_its_files_on_as_many_gpus() -> None:
    earlier = [run_on(4, "a", {"x": 1, "y": 2}), run_on(1, "a", {"x": 1, "y": 1, "z": 1})]
    assert merged(earlier, run_on(1, "b", {"x": 9, "z": 9})) == [
        run_on(4, "a", {"x": 1, "y": 2}),
        run_on(1, "a", {"y": 1}),
        run_on(1, "b", {"x": 9, "z": 9}),
    ]


def test_files_of_one_commit_are_one_run() -> None:
    assert merged([run_on(1, "a", {"y": 1, "z": 1})], run_on(1, "a", {"x": 2, "z": 3})) == [
        run_on(1, "a", {"x": 2, "y": 1, "z": 3})
    ]


@pytest.mark.skipif(not RESULT.exists(), reason="no run on GPUs is recorded")
def test_the_recorded_runs_say_what_ran_where() -> None:
    runs = json.loads(RESULT.read_text())["runs"]
    assert runs
    for run in runs:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]) and re.fullmatch(r"[0-9a-f]{40}", run["commit"])
        assert {"gpu", "gpus", "driver", "torch", "cuda", "triton", "lightning", "diffusers"} <= run["machine"].keys()
        assert run["machine"]["gpus"] >= 1 and run["files"]
        for name, counts in run["files"].items():
            assert (RESULT.parent / name).is_file(), f"{name} is gone: run `make test-gpu` again"
            assert counts["passed"] >= 0 and counts["seconds"] >= 0.0
            assert all(isinstance(test, str) for test in counts["failed"])
            assert all(count >= 1 and reason for reason, count in counts["skipped"].items())
