"""Measured beside predicted: the numbers of the files, errors as docs/scaling.md counts them, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predictions.beside import balances, layers, page, picks, steps

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
PREDICTION = json.loads((RESULTS / "predictions/scaling-h200.json").read_text())
Result = dict[str, Any]


def measured(factor: float, **settings: Any) -> Result:
    """Whole steps on eight GPUs that take a factor of what is predicted."""
    names = {"Wan-1.3B": "wan-1.3b", "Wan-14B, 8 layers": "wan-14b-8"}
    usual = {"strategy": "ddp", "transport": "collective", "schedule": "serial", "mode": "graphs"}
    rows = [
        usual
        | {name: row[name] for name in ("tokens", "gpus", "ulysses", "ring")}
        | {"model": names[row["model"]], "layout": f"{row['ulysses']}x{row['ring']}"}
        | {"sp": row["ulysses"] * row["ring"], "step_ms": factor * row["device_ms"]}
        | {"per_gpu_over_whole_clips": row["per_gpu_over_one"]}
        for row in PREDICTION["rows"]
        if row["kind"] == "strong scaling" and row["gpus"] == 8
    ]
    machine = {"gpu": "NVIDIA H200", "gpus": 8, "torch": "2.11.0"}
    return {"benchmark": "parallel/strong_scaling", "commit": "a" * 40, "machine": machine} | {
        "settings": settings,
        "rows": rows,
    }


def balanced(**settings: Any) -> Result:
    """Balances on eight ranks whose steps wait twice as long as was simulated."""
    rows = [
        {name: row[name] for name in ("balance", "micro_batches")}
        | {"m_comp_over_longest": None if row["balance"] == "equal_token" else 1.0}
        | {"share_of_measured_compute": 2 * row["efficiency"] - 1, "cv_step_mean": 2 * row["cv_step"]}
        for row in PREDICTION["rows"]
        if (row["kind"], row.get("ranks")) == ("balance", 8)
    ]
    return measured(1.0) | {
        "benchmark": "data/balances",
        "settings": {"ranks": 8, "longest": 75_600, "m_mem_over_longest": 2.0} | settings,
        "rows": rows,
    }


def committed(name: str) -> Result:
    found: Result = json.loads((RESULTS / f"{name}-h200x2.json").read_text())
    return found


def test_steps_of_the_published_table_are_beside_their_own_prediction() -> None:
    cases = list(steps(measured(1.2), PREDICTION))
    assert len(cases) == 2 * 32 and all(case.is_published for case in cases)  # ms, and the throughput of a GPU
    assert [case.error for case in cases[::2]] == pytest.approx([1 / 1.2 - 1] * 32, abs=1e-9)
    assert [case.error for case in cases[1::2]] == pytest.approx([0.0] * 32, abs=0.02)


@pytest.mark.parametrize(("factor", "off"), [(0.95, 0), (1.09, 0), (1.2, 32)])
def test_what_is_off_by_more_than_a_tenth_is_bold(factor: float, off: int) -> None:
    text = "\n".join(page(measured(factor), PREDICTION))
    assert text.count("**") == 2 * off
    assert f"{off} of 32 are off by more than 10%" in text


def test_steps_that_compute_the_forward_pass_twice_are_predicted_longer() -> None:
    once, twice = (list(steps(measured(1.0, checkpointing=again), PREDICTION))[::2] for again in (False, True))
    assert not any(case.is_published for case in twice)
    ratios = [b.predicted / a.predicted for a, b in zip(once, twice, strict=True)]
    assert min(ratios) > 1.1 and max(ratios) < 1.4


def test_other_exchanges_and_refused_cells_are_not_compared() -> None:
    result = measured(1.0)
    result["rows"] = [row | {"schedule": "sliced"} for row in result["rows"][:2]] + [{"refused": "no ring"}]
    assert list(steps(result, PREDICTION)) == []
    assert "1 cells were refused." in "\n".join(page(result, PREDICTION))


def test_layers_on_two_gpus_are_beside_what_the_file_predicted() -> None:
    cases = list(layers(committed("parallel/layouts"), PREDICTION))
    assert [case.cell for case in cases if abs(case.error) > 0.1] == [
        "12 heads, 8192 tokens, 2 x 1",
        "12 heads, 8192 tokens, 1 x 2",
    ]
    assert {(pick.picked, pick.over_best) for pick in picks(committed("parallel/layouts"))} == {("2 x 1", 1.0)}


def test_balances_are_beside_the_simulation_of_as_many_ranks() -> None:
    cases = list(balances(balanced(), PREDICTION))
    assert len(cases) == 2 * 9
    assert [case.error for case in cases[1::2]] == pytest.approx([-0.5] * 9)
    assert all(case.predicted > case.measured for case in cases[::2])


def test_balances_of_other_budgets_are_left_out() -> None:
    assert "Nothing was predicted: only a mix of" in "\n".join(page(balanced(m_mem_over_longest=4.0), PREDICTION))
    assert "on 3 ranks were not simulated" in "\n".join(page(balanced(ranks=3), PREDICTION))
    own = balanced()
    own["rows"] = [row | {"m_comp_over_longest": 1.55} for row in own["rows"]]
    assert list(balances(own, PREDICTION)) == []


def test_a_pick_is_beside_the_fastest_of_as_many_ranks() -> None:
    result = measured(1.0)
    chosen = next(row for row in result["rows"] if (row["tokens"], row["ulysses"]) == (75_600, 8))
    result["rows"].append(chosen | {"layout": "auto"})
    (pick,) = picks(result)
    assert (pick.picked, pick.best) == ("8 x 1", "4 x 2") and pick.over_best == pytest.approx(1339 / 1152, abs=0.01)


def test_other_benchmarks_have_a_table_of_what_was_measured() -> None:
    rows = [{"variant": "today", "over_today": 1.0}, {"variant": "all", "over_today": 1.25678, "steps": 16}]
    lines = list(page(measured(1.0) | {"benchmark": "suite", "rows": rows}, PREDICTION))
    assert lines[1:5] == [
        "| variant | steps | over_today |",
        "|---|---|---|",
        "| today |  | 1 |",
        "| all | 16 | 1.257 |",
    ]
