"""A sample of the fuzzer that drives every op (tests/gpu/fuzz_ops.py), and whether it sees what is wrong."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_videoscale.kernels.reference import rows as reference
from lightning_videoscale.kernels.row_types import RowOutputs
from tests.gpu.fuzzing.cases import Options, Verdict, judge
from tests.gpu.fuzzing.workers import verdicts
from tests.kernels.interpreted.process import run_interpreted

OPTIONS = Options("cpu", "reference", elements=4_000)
SEEDS = range(6_650, 6_800)
CALLS = itertools.count()


def wrong(results: list[Verdict]) -> list[tuple[int, str]]:
    return [(verdict.seed, verdict.message) for verdict in results if verdict.status == "wrong"]


def test_the_reference() -> None:
    results = [judge(seed, OPTIONS) for seed in SEEDS]
    assert not wrong(results)
    right = Counter(verdict.op for verdict in results if verdict.status == "right")
    assert len(right) >= 8 and right.total() > 0.9 * len(SEEDS)


@pytest.mark.full  # `make test` has these cases in interpreted/rows.py
def test_triton_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    options = "--device cpu --backend triton --seeds 6726:6741 --elements 64 --workers 0"
    result = run_interpreted("tests.gpu.fuzz_ops", *options.split())
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "15 cases in" in result.stdout


def off_in_one_element(y: Tensor) -> Tensor:
    y.view(-1)[-1] *= 1 + (1e-4 if y.dtype is torch.float32 else 0.02)
    return y


def not_written_in_one_element(y: Tensor) -> Tensor:
    written = torch.empty_like(y)
    written.view(-1)[:-1] = y.view(-1)[:-1]
    return written


def another_one_every_time(y: Tensor) -> Tensor:
    return y * (1 + 1.2e-7 * (next(CALLS) % 5))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (off_in_one_element, "y is off"),
        (not_written_in_one_element, "y is off by inf"),
        (another_one_every_time, "the second run"),
    ],
)
def test_a_fault_is_seen(fault: Callable[[Tensor], Tensor], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.forward

    def faulty(*arguments: Any) -> RowOutputs:
        outputs = original(*arguments)
        return outputs if outputs.y is None else outputs._replace(y=fault(outputs.y))

    monkeypatch.setattr(reference, "forward", faulty)
    assert any(message in said for _, said in wrong([judge(seed, OPTIONS) for seed in SEEDS[:50]]))


@pytest.mark.full
def test_processes_come_to_the_same_verdicts() -> None:
    alone = {verdict.seed: verdict for verdict in verdicts(SEEDS[:20], OPTIONS, 0)}
    assert {verdict.seed: verdict for verdict in verdicts(SEEDS[:20], OPTIONS, 2)} == alone
