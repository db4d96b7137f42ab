"""What is blamed: a slow rank, wrong predictions, the plan, or chance; and one figure for one slow rank."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lightning_videoscale.report import RunLog, write_report
from lightning_videoscale.report.bottlenecks import figure_of, shares_of, straggler_of
from lightning_videoscale.report.drift import find_drift
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.judge import advice_on_bottleneck
from lightning_videoscale.report.reading import read_run
from lightning_videoscale.report.records import window_record
from lightning_videoscale.report.sections import tiles
from lightning_videoscale.report.slowness import slowdowns_of
from lightning_videoscale.timing import MicroBatchLoad, StepTimes
from tests.report.simulated import add_findings, log_run, resume, start_fields
from tests.timing.windows import window_of


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_a_slow_rank_is_blamed_and_not_the_plan_that_is_even(tmp_path: Path, device: str) -> None:
    log = log_run(tmp_path, slowdown=1.3, device=device)
    # What BottleneckAnalyzer and BudgetRecalibrator hand in of the same rank.
    quick, slow = StepTimes(forward=1.0, wait=0.3), StepTimes(forward=1.3)
    window = window_of([[slow if rank == 5 else quick] for rank in range(8)])
    shares, straggler, on_gpu = shares_of(window), straggler_of(window), device != "cpu"
    found = {"name": shares.bottleneck, "share": shares.share("straggler")}
    found |= {"figure": figure_of(shares.bottleneck, shares, straggler)}
    found |= {"advice": advice_on_bottleneck(shares.bottleneck, straggler, on_gpu)}
    log.append("bottleneck", 150, found)
    reason = "slow, and no reason to change costs: data-parallel rank 5"
    log.append("budget", 150, {"adopted": False, "reason": reason, "m_mem": 1, "m_comp": 1, "p": 2})

    findings = Findings(read_run(tmp_path))
    assert np.median(findings.per_step("cost_cv")) < 0.03
    [rank] = findings.slow_ranks
    assert rank.rank == 5 and rank.slowdown == pytest.approx(1.3, rel=0.02)
    assert findings.cause == "rank" and findings.even_idle < 0.25 * findings.idle
    assert "Rank 5" in findings.verdict.text and "balanced" not in findings.verdict.text
    html = write_report(tmp_path).read_text()
    factors = set(re.findall(r"\b(\d\.\d+) (?:\u00d7|x\b|times)", html))
    assert factors == {f"{rank.slowdown:.2f}"}, "one figure, wherever it is said"
    assert ("nvidia-smi" in html) == on_gpu
    assert [advice.why for advice in findings.advice if "rank 5" in advice.what.lower()]


def test_an_uneven_plan_is_blamed_for_itself(tmp_path: Path) -> None:
    log_run(tmp_path, "equal_token", slowdown=1.0)
    found = Findings(read_run(tmp_path))
    assert found.cause == "plan" and found.slow_ranks == [] and found.verdict.text.startswith("Not balanced")


def test_times_that_vary_are_blamed_on_nobody(tmp_path: Path) -> None:
    log_run(tmp_path, slowdown=1.0, noise=0.15)
    found = Findings(read_run(tmp_path))
    assert found.cause == "chance" and found.slow_ranks == [] and found.verdict.text.startswith("Times vary")
    assert not [advice for advice in found.advice if "balance" in advice.what]


def test_a_rank_with_more_work_is_not_slow() -> None:
    """Rank 0 trains the long clips, and takes as long for them as anybody would."""
    draw = np.random.default_rng(0)
    lengths = [[1000, 4000, 8000], [500, 1000, 4000], [500, 1000, 4000]]
    loads = [[MicroBatchLoad(1, int(s), 1.0) for s in draw.choice(of_rank, 40)] for of_rank in lengths]
    for slow in (1.0, 1.5):
        times = [
            [StepTimes(forward=(1e-4 * load.tokens + 2e-8 * load.tokens**2) * (slow if rank == 2 else 1.0))
             for load in row] for rank, row in enumerate(loads)
        ]  # fmt: skip
        assert slowdowns_of(window_of(times, loads)) == pytest.approx([1.0, 1.0, slow], rel=0.05)


@pytest.mark.parametrize(
    ("rows", "in_process", "words"),
    [
        ([[40, 0, 0.2, 0.8, 49.0], [40, 0, 0.2, 0.8, 49.0]], False, ("more of them would not help", "2.0\u00a0%")),
        ([[40, 0, 1.0, 45.0, 4.0]], False, ("Raise num_workers", "98\u00a0% decoding")),
        ([[40, 0, 40.0, 5.0, 5.0]], False, ("Look at the storage", "89\u00a0% is reading")),
        ([[40, 0, 1.0, 19.0, 300.0]], True, ("Raise num_workers", "95\u00a0% decoding")),
    ],
)
def test_workers_with_enough_in_stock_are_not_blamed_for_waiting_for_data(
    tmp_path: Path, rows: list[list[float]], in_process: bool, words: tuple[str, str]
) -> None:
    log = log_run(tmp_path, slowdown=1.0)
    log.append("loading", 150, {"in_process": in_process, "workers": [rows], "left_out": []})
    assert Findings(read_run(tmp_path)).advice == [], "nobody waits for data"
    figure = "Ranks wait for data for 17% of the step."
    log.append("bottleneck", 150, {"name": "data", "share": 0.17, "figure": figure, "advice": "Raise num_workers"})
    [advice] = Findings(read_run(tmp_path)).advice
    assert words[0] in advice.what and words[1] in advice.why and figure in advice.why


def test_long_validations_hide_no_waiting_for_data(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("start", 0, start_fields(2))
    times = [StepTimes(data=1.0, forward=4.0, other=15.0)]
    log.append("window", 1, window_record(window_of([times, times])))
    log.append("loading", 1, {"in_process": False, "workers": [[[9, 0, 1.0, 8.0, 1.0]]] * 2, "left_out": []})
    found = Findings(read_run(tmp_path))
    assert found.share_of("data") == 0.2, "1 s of steps of 5 s, with 15 s between them"
    assert "Raise num_workers of VideoDataModule" in found.advice[-1].what
    assert found.advice[-1].why.startswith("Ranks wait for data for 20\u00a0% of their steps.")


def test_an_older_log_names_no_rank(tmp_path: Path) -> None:
    log_run(tmp_path, slowdown=1.3)
    run = read_run(tmp_path)
    for window in run.of("window"):
        del window["slowdowns"], window["even_idle_seconds"]
    found = Findings(run)
    assert found.slow_ranks == [] and found.cause != "rank"


def test_the_verdict_is_on_the_ranks_that_train_in_the_end(tmp_path: Path) -> None:
    log_run(tmp_path / "alone", dp_size=1, steps=40, slowdown=1.0)  # one rank waits for nobody
    log_run(tmp_path / "uneven", "equal_token", steps=20, slowdown=1.0)
    expected = Findings(read_run(tmp_path / "uneven"))
    resume(tmp_path / "alone", tmp_path / "uneven", steps=40)
    found = Findings(read_run(tmp_path / "alone"))
    assert found.verdict == expected.verdict and found.cause == expected.cause == "plan"
    assert (found.idle, found.compute_idle) == (expected.idle, expected.compute_idle)
    assert found.steps == 60, "the rest of the page is about the whole run"


def test_ranks_that_never_trained_are_not_judged(tmp_path: Path) -> None:
    log_run(tmp_path, dp_size=1, steps=20).append("start", 20, start_fields(8))
    assert Findings(read_run(tmp_path)).verdict.text.startswith("One data-parallel rank")


def test_ranks_that_share_sequences_are_others(tmp_path: Path) -> None:
    log = log_run(tmp_path, dp_size=1, steps=20)
    record = read_run(tmp_path).of("window")[-1]
    log.append("start", 20, start_fields(1, exchange={"strategy": "DDP", "data-parallel ranks": 2}))
    log.append("window", 30, record | {"cv_step": [0.3] * record["steps"]})
    assert Findings(read_run(tmp_path)).verdict.tone == "bad"


def test_a_run_that_goes_on_on_another_device_is_judged_by_the_steps_there(tmp_path: Path) -> None:
    log, there = log_run(tmp_path / "first", steps=70, slowdown=1.0), tmp_path / "then"
    add_findings(log, steps=70)  # peaks of more than 100 GiB
    log.append("bottleneck", 70, {"name": "data", "share": 0.2, "figure": "", "advice": "stop waiting"})
    slower = log_run(there, steps=70, slowdown=1.0, pace=2.0, device="NVIDIA A100")
    peak = {"allocated_gib": 20.0, "reserved_gib": 70.0, "peak_gib": 60.0, "fragmentation": 0.0}
    slower.append("memory", 70, peak | {"fits_tokens": 160_000, "headroom_tokens": 0})
    expected = Findings(read_run(there))
    resume(tmp_path / "first", there, steps=70)

    found = Findings(read_run(tmp_path / "first"))
    assert find_drift(found.windows) is not None and found.drift is None, "it is another device that is slower"
    assert found.advice == expected.advice and found.verdict == expected.verdict
    assert found.model == expected.model and found.planner_error == expected.planner_error
    assert ("Peak memory", "60.0 GiB", "of 79.3 GiB") in tiles(found)
    assert found.notes[-1].startswith("Balance and pace are judged by 70 of 140 steps")


def test_ranks_that_wait_within_steps_are_not_balanced_by_even_steps(tmp_path: Path) -> None:
    short, long = StepTimes(forward=1.0, wait=2.0), StepTimes(forward=3.0)
    log, start = log_run(tmp_path, dp_size=2, steps=0), start_fields(2)
    log.append("start", 0, start)
    for step in (1, 2):
        window = window_of([[short, long], [long, short]], micro_batches=[2], in_slots=True)
        log.append("window", step, window_record(window))
    found = Findings(read_run(tmp_path))
    assert float(found.per_step("cv_step").max()) == 0.0 and found.idle == pytest.approx(1 / 3)
    assert found.verdict.tone == "bad" and found.verdict.text.startswith("Not balanced")
