"""A benchmark that is ended before its end keeps what it has measured, and the next call goes on from there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_videoscale as vs
from lightning_videoscale.cost import MatrixRow, ShapeMatrix
from lightning_videoscale.cost.benchmark.growing_matrix import GrowingMatrix
from lightning_videoscale.data import RandomBatches
from tests.cost.benchmark.flow import SHAPES, Flow
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
CELLS = [(4, 1), (4, 4), (16, 1), (48, 1), (80, 1), (4, 24), (16, 6), (48, 2)]


class Interrupted(Flow):
    """Is ended at its first batch of so many tokens; notes what it has trained on.

    Args:
        tokens: Of one sample; None: never.
    """

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.seen: list[tuple[int, int]] = []
        self.states: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        meta = batch["meta"]
        if meta.sequence_length == self.tokens:
            raise KeyError("the end of this job")
        self.seen.append((meta.sequence_length, meta.samples))
        self.states.append(len(self.optimizers().optimizer.state))
        return super().training_step(batch, batch_idx)


def _benchmark(module: Flow, file: Path, **trainer: Any) -> ShapeMatrix:
    settings: dict[str, Any] = {"batches": RandomBatches(4), "max_tokens": 96, "seconds": 1e-9, "progress": False}
    return vs.benchmark_shapes(trainer_with(**trainer), module, SHAPES, file=file, **settings)


def _cells(matrix: ShapeMatrix) -> list[tuple[int, int]]:
    return [(row.sequence_length, row.samples) for row in matrix.rows]


def _as_if(part: Path, **values: float) -> ShapeMatrix:
    """Rewrites the rows of an earlier run with these values; without any, repeats of the same time."""
    begun = ShapeMatrix.load(part)
    begun = replace(begun, rows=tuple(replace(row, **({"spread": 0.0} | values)) for row in begun.rows))
    begun.save(part)
    return begun


def test_it_goes_on_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file, part = tmp_path / "results" / "matrix.json", tmp_path / "results" / "matrix.json.part"
    with pytest.raises(KeyError, match="the end of this job"):
        _benchmark(Interrupted(48), file)
    begun = _as_if(part)
    assert _cells(begun) == CELLS[:3] and not file.exists()

    module = Interrupted()
    assert "goes on" not in caplog.text
    matrix = _benchmark(module, file)
    assert f"3 rows in {part}" in caplog.text
    assert _cells(matrix) == CELLS and matrix.rows[:3] == begun.rows
    assert set(module.seen) == set(CELLS[3:])
    # A new process has new optimizers: they get their states before anything is measured.
    assert module.states[0] == 0 and set(module.states[1:]) == {sum(p.requires_grad for p in module.parameters())}
    assert ShapeMatrix.load(file) == matrix
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(("spread", "again"), [(0.02, []), (0.05, CELLS[:3])])
def test_cells_whose_two_repeats_differed_are_measured_once_more(
    spread: float, again: list[tuple[int, int]], tmp_path: Path
) -> None:
    with pytest.raises(KeyError):
        _benchmark(Interrupted(48), tmp_path / "matrix.json")
    _as_if(tmp_path / "matrix.json.part", spread=spread, seconds=9.0)
    module = Interrupted()
    matrix = _benchmark(module, tmp_path / "matrix.json")
    assert [cell for cell in CELLS[:3] if cell in module.seen] == again
    assert [row.seconds == 9.0 for row in matrix.rows[:3]] == [not again] * 3


def test_two_jobs_may_finish_one_file(tmp_path: Path) -> None:
    file, trainer = tmp_path / "matrix.json", trainer_with()
    first = GrowingMatrix(trainer, {"gpu": None}, None, file)
    first.append(MatrixRow(1, 4, 4, 1, 4, seconds=1.0))
    second = GrowingMatrix(trainer, {"gpu": None}, None, file)
    assert first.finish() == second.finish() == ShapeMatrix.load(file)
    assert [*tmp_path.iterdir()] == [file]


def test_a_benchmark_that_is_whole_is_measured_anew(tmp_path: Path) -> None:
    _benchmark(Interrupted(), tmp_path / "matrix.json")
    module = Interrupted()
    _benchmark(module, tmp_path / "matrix.json")
    assert set(module.seen) == set(CELLS)


def test_rows_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        _benchmark(Interrupted(48), tmp_path / "matrix.json")
    with pytest.raises(ValueError, match=r"3 rows .*'32-true' .*'bf16-true'"):
        _benchmark(Interrupted(), tmp_path / "matrix.json", precision="bf16-true")
    assert _cells(ShapeMatrix.load(tmp_path / "matrix.json.part")) == CELLS[:3]


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module = Interrupted()
    with pytest.raises(OSError):
        _benchmark(module, tmp_path / "file" / "matrix.json")
    assert not module.seen


def test_a_url_is_no_place_either(tmp_path: Path) -> None:
    module = Interrupted()
    with pytest.raises(ValueError, match="file='s3:"):
        _benchmark(module, "s3://bucket/matrix.json")  # type: ignore[arg-type]
    assert not module.seen


def test_neither_are_rows_of_an_earlier_run_gone_on_from_where_no_more_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError):
        _benchmark(Interrupted(48), tmp_path / "matrix.json")
    # A folder that is read-only is not so to root, whom containers run as.
    monkeypatch.setattr(Path, "replace", _refuse)
    module = Interrupted()
    with pytest.raises(OSError, match="read-only"):
        _benchmark(module, tmp_path / "matrix.json")
    assert not module.seen


def _refuse(*_: Any) -> None:
    raise OSError("read-only file system")


def _on_two_ranks(folder: Path) -> tuple[str, ShapeMatrix, list[tuple[int, int]]]:
    file = folder / os.environ["RANK"] / "matrix.json"  # as if each node had its own disk
    said = ""
    try:
        _benchmark(Interrupted(48), file, strategy="ddp", devices=2)
    except KeyError as error:
        said = str(error)
    if os.environ["RANK"] == "0":
        _as_if(file.with_name("matrix.json.part"))
    module = Interrupted()
    return said, _benchmark(module, file, strategy="ddp", devices=2), module.seen


def test_all_ranks_go_on_alike_from_what_rank_0_has(ranks: Ranks, tmp_path: Path) -> None:
    (said, matrix, seen), theirs = ranks(2).run(_on_two_ranks, tmp_path)
    assert theirs == (said, matrix, seen) and "the end of this job" in said
    assert set(seen) == set(CELLS[3:]) and _cells(matrix) == CELLS
    assert ShapeMatrix.load(tmp_path / "0" / "matrix.json") == matrix and not (tmp_path / "1").exists()
