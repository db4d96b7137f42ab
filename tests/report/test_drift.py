"""A fall of the throughput is found, with when, by how much and why; noise, a slow start and a slow window are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.report import drift as drift_module
from lightning_videoscale.report import write_report
from lightning_videoscale.report.drift import find_drift
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from tests.report.simulated import log_run, resume, start_fields

PARTS = {"data": 0.01, "forward": 0.3, "backward": 0.6, "wait": 0.05, "exchange": 0.0, "optimizer": 0.04, "other": 0.5}


def windows(
    rates: list[float], grown: str = "backward", kind: tuple[int, ...] = (1, 4, 4, 100, 2)
) -> list[dict[str, Any]]:
    """Windows of 10 steps and 10,000 tokens at these rates; what takes longer than at the first rate is ``grown``."""
    found = []
    for n, rate in enumerate(rates):
        seconds = 10_000 / rate
        share = {**PARTS, grown: PARTS[grown] + rates[0] / rate - 1}
        ranks = {name: [part * 10_000 / rates[0]] * 2 for name, part in share.items()}
        longer = rates[0] / rate if grown == "backward" else 1.0
        fields = {"seconds": seconds, "tokens": 10_000, "ranks": ranks, "batches": [[*kind, 5, 0, 0.1 * longer]]}
        found.append({"step": 10 * (n + 1), **fields})
    return found


def noisy(rate: float, count: int, seed: int, spread: float = 0.1) -> list[float]:
    return (rate * np.random.default_rng(seed).lognormal(0, spread, count)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_is_found_where_it_is(seed: int) -> None:
    drift = find_drift(windows([*noisy(905, 8, seed), *noisy(340, 12, seed + 100)]))
    assert drift is not None and drift.step == 80
    assert drift.before == pytest.approx(905, rel=0.15) and drift.after == pytest.approx(340, rel=0.15)
    assert drift.lost == pytest.approx(1 - 340 / 905, abs=0.1)
    assert drift.grown == "backward" and drift.same_work == pytest.approx(905 / 340, rel=0.2)


@pytest.mark.parametrize("at", [4, 300, 3_000, 5_700, 5_995])
def test_a_fall_is_found_where_it_is_in_a_long_run_too_without_trying_everything(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    is_fall = drift_module._is_fall
    monkeypatch.setattr(drift_module, "_is_fall", lambda *sides: tried.append(1) or is_fall(*sides))
    drift = find_drift(windows([*noisy(900, at, 0), *noisy(500, 6_000 - at, 1)]))
    assert drift is not None and drift.step == 10 * at
    assert len(tried) < 700


@pytest.mark.parametrize("part", ["data", "wait", "exchange", "optimizer"])
def test_what_grew_is_named(part: str) -> None:
    drift = find_drift(windows([900.0] * 4 + [500.0] * 4, grown=part))
    assert drift is not None and (drift.grown, drift.same_work) == (part, 1.0)


def test_a_gradual_fall_is_one() -> None:
    drift = find_drift(windows(np.geomspace(900, 300, 20).tolist()))
    assert drift is not None and 50 <= drift.step <= 150 and 0.3 < drift.lost < 0.6


@pytest.mark.parametrize(
    "rates",
    [
        *(noisy(500, 30, seed, spread=0.25) for seed in range(8)),
        [100.0, 200.0] + [500.0] * 10,  # a slow start
        [500.0] * 10 + [100.0] + [500.0] * 4,  # one slow window
        [500.0] * 10 + [430.0] * 10,  # too little
        [500.0] * 10 + [200.0] * 2,  # too short to tell
        [500.0, 900.0] * 8,  # two kinds of windows
        [500.0],
        [],
    ],
)  # fmt: skip
def test_no_fall(rates: list[float]) -> None:
    assert find_drift(windows(rates)) is None


def test_windows_that_do_not_tell_are_left_out() -> None:
    silent: dict[str, Any] = {"step": 5, "tokens": None, "seconds": 1.0, "ranks": {}, "batches": []}
    assert find_drift([silent] * 10) is None
    drift = find_drift([silent, *windows([900.0] * 3 + [500.0] * 3), silent])
    assert drift is not None and drift.step == 30


def test_other_shapes_are_told_from_slower_work(tmp_path: Path) -> None:
    rates = [900.0] * 4 + [500.0] * 4
    same, other = windows(rates), [*windows(rates[:4]), *windows(rates, kind=(9, 8, 8, 900, 1))[4:]]
    pages = {}
    for name, records in (("same", same), ("other", other)):
        log = log_run(tmp_path / name, steps=0)
        log.append("start", 0, start_fields(2))
        for record in records:
            silent = {"samples": 10, "steps": 10, "cv_step": [0.1], "compute_cv": [0.1], "cost_cv": None}
            log.append("window", record["step"], record | silent | {"idle_seconds": 0.1, "slowest_seconds": 1.0})
        pages[name] = write_report(tmp_path / name).read_text().replace("\N{NO-BREAK SPACE}", " ")
    for page in pages.values():
        assert "44 %" in page and "step 40" in page and "From 900 to 500 tokens/s" in page
    assert "1.80 times" in pages["same"] and "1.80 times" not in pages["other"]


def test_a_run_that_keeps_its_pace_is_not_blamed(tmp_path: Path) -> None:
    log_run(tmp_path)
    assert "Throughput fell" not in write_report(tmp_path).read_text()


def test_fewer_ranks_are_no_fall(tmp_path: Path) -> None:
    log_run(tmp_path / "first", dp_size=8, steps=80, slowdown=1.0)
    log_run(tmp_path / "then", dp_size=4, steps=80, slowdown=1.0)
    resume(tmp_path / "first", tmp_path / "then", steps=80)
    run = read_run(tmp_path / "first")
    assert find_drift(run.of("window")) is not None
    assert Findings(run).drift is None
