"""A benchmark's file, written, read back and fitted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_videoscale.cost import MatrixRow, MemoryModel, ShapeMatrix, StepTimeModel


def _matrix() -> ShapeMatrix:
    """Seconds = 0.01 + 1e-5 S B + 1e-9 S² B, bytes = 1e9 + 5e5 S B, on a device of 20 GB."""
    rows = [
        MatrixRow(
            frames=s // 100,
            height=20,
            width=20,
            samples=b,
            sequence_length=s,
            seconds=0.01 + 1e-5 * b * s + 1e-9 * b * s * s,
            spread=0.01,
            wait_seconds=0.002,
            peak_bytes=1e9 + 5e5 * b * s,
        )
        for s in (300, 1000, 3000, 10_000, 30_000)
        for b in (1, 2, 4)
        if b * s <= 30_000
    ]
    rows.append(MatrixRow(300, 20, 20, 2, 30_000, "out_of_memory"))
    return ShapeMatrix(tuple(rows), {"gpu": "a GPU", "precision": "bf16-mixed"}, capacity_bytes=20e9)


def test_what_is_saved_is_read_back_and_fitted(tmp_path: Path) -> None:
    matrix = _matrix()
    matrix.save(tmp_path / "folder" / "matrix.json")
    read = ShapeMatrix.load(tmp_path / "folder" / "matrix.json")
    assert read == matrix

    step_time = StepTimeModel.fit(read.measurements)
    assert step_time.predict(3, 5000) == pytest.approx(0.01 + 0.15 + 0.075, rel=1e-6)
    memory = MemoryModel.fit(read.measurements)
    # 5 % of 20 GB are kept free, 1 GB is taken before the first token, each of which takes 500 kB.
    assert memory.m_mem(read.capacity_bytes or 0.0) == pytest.approx((19e9 - 1e9) / 5e5, abs=1)


def test_a_file_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _matrix().save("~/matrix.json")
    assert ShapeMatrix.load("~/matrix.json") == ShapeMatrix.load(tmp_path / "matrix.json") == _matrix()


def test_what_did_not_fit_is_no_measurement() -> None:
    matrix = _matrix()
    assert len(matrix.measurements) == len(matrix.rows) - 1
    assert all(m.samples * m.sequence_length <= 30_000 for m in matrix.measurements)


def test_the_difference_to_a_run_is_named() -> None:
    matrix = _matrix()
    names = ("gpu", "precision")
    assert matrix.differences({"gpu": "a GPU", "precision": "bf16-mixed"}, names) == []
    assert matrix.differences({"gpu": "another", "precision": "bf16-mixed"}, names) == [
        "gpu: 'a GPU' measured, 'another' now"
    ]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", json.dumps({"format": 99, "rows": []}), '{"format": 1, "rows": [1]}']
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "matrix.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"matrix\.json"):
        ShapeMatrix.load(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", "2"),  # 64 times that is a text of 64 digits
        ("samples", 0),
        ("sequence_length", None),
        ("seconds", math.nan),
        ("seconds", 0.0),
        ("seconds", "0.5"),
        ("peak_bytes", -5),
        ("peak_bytes", math.inf),
        ("outcome", "Measured"),
    ],
)
def test_a_number_that_nobody_measured_is_named(tmp_path: Path, name: str, value: Any) -> None:
    file = tmp_path / "matrix.json"
    _matrix().save(file)
    content = json.loads(file.read_text())
    content["rows"][2][name] = value
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"matrix\.json.*{name}={value!r}"):
        ShapeMatrix.load(file)


@pytest.mark.parametrize("wrong", [{"provenance": None}, {"capacity_bytes": "8e9"}, {"capacity_bytes": math.nan}])
def test_so_is_what_the_rows_shall_hold_for(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file = tmp_path / "matrix.json"
    _matrix().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(ValueError, match=rf"matrix\.json.*{next(iter(wrong))}={next(iter(wrong.values()))!r}"):
        ShapeMatrix.load(file)


@pytest.mark.parametrize("size", [None, 0, -2, "2", 2.0])
def test_a_group_of_no_number_of_ranks_is_named(tmp_path: Path, size: Any) -> None:
    replace(_matrix(), provenance={"sequence_parallel_size": size}).save(tmp_path / "matrix.json")
    with pytest.raises(ValueError, match=rf"matrix\.json.*sequence_parallel_size={size!r}"):
        ShapeMatrix.load(tmp_path / "matrix.json")
