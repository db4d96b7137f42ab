"""What was measured of a kind of call: which kernel that makes the fastest, and the file that keeps it."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from lightning_videoscale import measurement_file
from lightning_videoscale.attention.records import SDPA, AttentionRecord, RecordFile, slowest_of_ranks
from tests.attention.cases import key, record


@pytest.mark.parametrize(
    ("times", "calls", "fastest"),
    [
        (record(sdpa=10.0, flash=9.0), 1000, "flash"),
        (record(sdpa=10.0, flash=9.95), 1000, SDPA),  # within the spread of a measurement
        (record(sdpa=10.0, flash=10.0), 1000, SDPA),
        (record(sdpa=10.0), 1000, SDPA),
        # cuDNN's plan of half a second is worth it in 1000 calls of a shape, and not in 50.
        (record(sdpa=(10.0, 500.0), flash=18.0), 1000, SDPA),
        (record(sdpa=(10.0, 500.0), flash=18.0), 50, "flash"),
    ],
)
def test_the_fastest_over_all_calls_of_a_shape_is_chosen(times: AttentionRecord, calls: float, fastest: str) -> None:
    assert times.fastest(calls) == fastest


def test_what_was_late_on_one_rank_is_late_on_all() -> None:
    of_one = AttentionRecord(record(sdpa=10.0, math=9.0, flash=9.0).timings, {})
    of_other = AttentionRecord(record(sdpa=12.0).timings, {"math": "its turn", "flash": "wrong"}, ("math",))
    merged = slowest_of_ranks([of_one, of_other])
    assert merged.late == ("math",) and set(merged.reasons) == {"math", "flash"}
    # The second time the device took twice as long for all: what counts is the ratio.
    again = AttentionRecord(record(sdpa=24.0, math=6.0).timings, {})
    assert again.after(merged).timings["math"].steady == pytest.approx(3e-3)
    assert again.after(merged).late == ()


def test_of_several_ranks_the_slowest_counts_and_what_one_lacks_is_out() -> None:
    merged = slowest_of_ranks([record(sdpa=10.0, flash=8.0, math=7.0), record(sdpa=9.0, flash=11.0)])
    assert merged.timings == record(sdpa=10.0, flash=11.0).timings


@pytest.mark.parametrize("text", ["", "{", "[]", '{"records": [{}]}', '{"records": [{"key": [1], "timings": {}}]}'])
def test_a_file_that_cannot_be_read_is_measured_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile("cpu", tmp_path)
    file.path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert file.read() == {}
    assert str(file.path) in caplog.text and "<class" not in caplog.text
    file.add({key(4096): record(sdpa=1.0)})
    assert file.read() == {key(4096): record(sdpa=1.0)}


def test_a_file_that_cannot_be_written_is_said_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile("cpu", tmp_path)
    file.path.mkdir()  # which no file can replace
    with caplog.at_level(logging.WARNING):
        file.add({key(4096): record(sdpa=1.0)})
    assert "is not kept for the next run" in caplog.text
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == [file.path]


def test_of_several_that_add_at_once_nothing_is_lost(tmp_path: Path) -> None:
    def add(first: int) -> None:
        for number in range(first, first + 5):
            RecordFile("cpu", tmp_path).add({key(2**number): record(sdpa=1.0)})

    adding = [threading.Thread(target=add, args=(first,)) for first in range(0, 30, 5)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert set(RecordFile("cpu", tmp_path).read()) == {key(2**number) for number in range(30)}


def test_a_file_that_another_process_holds_is_not_waited_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_file, "_PATIENCE", 0.2)
    file = RecordFile("cpu", tmp_path)
    with file.path.with_suffix(".lock").open("w") as held, caplog.at_level(logging.WARNING):
        fcntl.flock(held, fcntl.LOCK_EX)
        file.add({key(4096): record(sdpa=1.0)})
    assert file.read() == {} and str(file.path.with_suffix(".lock")) in caplog.text


def test_files_of_other_versions_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = RecordFile("cpu", tmp_path)
    before.add({key(4096): record(sdpa=1.0)})
    before.add({key(8192): record(sdpa=2.0)})
    assert len(json.loads(before.path.read_text())["records"]) == 2
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert RecordFile("cpu", tmp_path).read() == {}
