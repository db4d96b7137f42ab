"""The run log: what is written, what a crash leaves, what is read back."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_videoscale.report import LOG_NAME, RunLog
from lightning_videoscale.report.reading import read_run


def _log(folder: Path, step: int = 0) -> RunLog:
    log = RunLog(folder)
    log.append("start", step, {"module": "Wan"})
    return log


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    log = _log(tmp_path / "new" / "folder")
    fields = {"peak": np.float64(1.5), "many": np.arange(2), "none": math.inf, "deep": [{"a": (1, 2)}]}
    log.append("memory", 7, fields | {"logged": torch.tensor(2.0), "per_rank": torch.tensor([1, 2])})
    start, line = (tmp_path / "new" / "folder" / LOG_NAME).read_text().splitlines()
    assert json.loads(start)["kind"] == "start"
    record = json.loads(line)
    assert record.pop("time") > 1.6e9
    plain = {"peak": 1.5, "many": [0, 1], "none": None, "deep": [{"a": [1, 2]}], "logged": 2.0, "per_rank": [1, 2]}
    assert record == {"v": 1, "kind": "memory", "step": 7} | plain


def test_what_comes_before_the_start_is_written_after_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("budget", 0, {"reason": "an earlier run was out of memory"})
    assert not (tmp_path / LOG_NAME).exists()
    log.append("start", 0, {})
    log.append("window", 5, {})
    assert [record["kind"] for record in read_run(tmp_path).records] == ["start", "budget", "window"]


def test_a_line_that_a_kill_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.append("window", 5, {"tokens": 1})
    with (tmp_path / LOG_NAME).open("a") as file:
        file.write('{"v": 1, "kind": "window", "st')
    run = read_run(tmp_path)
    assert [record["kind"] for record in run.records] == ["start", "window"]
    assert run.notes == ["Line 3 of run_log.jsonl cannot be read, as after a kill while writing, and is left out."]
    # The run that goes on there does not lose its first record to that line.
    _log(tmp_path, step=5).append("window", 10, {"tokens": 2})
    assert [record["step"] for record in read_run(tmp_path).records] == [0, 5, 5, 10]


def test_any_cut_leaves_whole_records(tmp_path: Path) -> None:
    log = _log(tmp_path)
    for step in range(1, 4):
        log.append("window", step, {"text": "ü" * step})
    content = (tmp_path / LOG_NAME).read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content) + 1):
        (tmp_path / LOG_NAME).write_bytes(content[:end])
        whole = content[:end].count(b"\n") + (end < len(content) and content[end : end + 1] == b"\n")
        assert len(read_run(tmp_path).records) == whole


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    log = _log(tmp_path)
    for step in (10, 20, 30):
        log.append("window", step, {"run": 1})
    resumed = _log(tmp_path, step=20)
    resumed.append("window", 30, {"run": 2})
    run = read_run(tmp_path)
    windows = [(record["step"], record["run"]) for record in run.of("window")]
    assert windows == [(10, 1), (20, 1), (30, 2)]
    assert run.notes == ["10 steps after step 20 were trained again after a restart."]


def test_steps_that_no_record_has_since_a_restart_came_between_are_said(tmp_path: Path) -> None:
    _log(tmp_path).append("window", 10, {})  # to step 16 or further, with a checkpoint there
    _log(tmp_path, step=16).append("window", 26, {})
    _log(tmp_path, step=26).append("window", 36, {})
    assert read_run(tmp_path).notes == ["6 steps up to step 16 are in no record: a restart came between."]


def test_so_are_those_before_the_first_record(tmp_path: Path) -> None:
    _log(tmp_path, step=100)  # of a run whose beginning is elsewhere
    log = _log(tmp_path, step=103)
    log.append("window", 113, {})
    assert read_run(tmp_path).notes == [
        "The log begins behind step 100: what the run trained before is not in these figures.",
        "3 steps up to step 103 are in no record: a restart came between.",
    ]


def test_a_new_run_in_the_same_folder_stands_alone(tmp_path: Path) -> None:
    _log(tmp_path).append("window", 10, {"run": 1})
    _log(tmp_path).append("window", 10, {"run": 2})
    run = read_run(tmp_path)
    assert [record["run"] for record in run.of("window")] == [2]
    assert run.notes == ["The log also holds 1 earlier start, left out here."]
    assert run.last("window") == run.of("window")[0] and run.last("memory") is None


def test_where_nothing_can_be_written_it_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = _log(tmp_path / "file")
        for step in range(3):
            log.append("window", step, {"unwritable": object()})
    assert len([w for w in caught if str(tmp_path / "file") in str(w.message)]) == 1


def test_what_cannot_be_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"callbacks=\[RunReport\(\)\]"):
        read_run(tmp_path)
    _log(tmp_path / "version_3")
    with pytest.raises(FileNotFoundError, match=r"version_3\b"):
        read_run(tmp_path)
    (tmp_path / LOG_NAME).write_text('not json\n{"v": 1, "kind": "window", "step": 1, "time": 0}\n')
    with pytest.raises(ValueError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / LOG_NAME).write_text('{"v": 2, "kind": "start", "step": 0, "time": 0}\n')
    with pytest.raises(ValueError, match=r"version 2\b.* 1\b"):
        read_run(tmp_path)
