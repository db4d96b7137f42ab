"""`benchmarks/data/balances.py` and what is replayed of it: steps counted by hand, and a dry run of both."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import launch
from benchmarks.callbacks.replayed_costs import ReplayedCosts
from benchmarks.data import balances
from benchmarks.data.balance_figures import FIELDS, Waits, columns_of, figures_of, of_groups, row_of
from benchmarks.data.balance_mix import table_of_draw
from benchmarks.data.balances import BALANCES, runs_of
from benchmarks.predictions import replayed_balances
from benchmarks.predictions.replay import Replay, costs_of, replay_of
from benchmarks.predictions.replayed_balances import checks
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.planning import BucketPlanner
from tests.data.planning.tables import footage, table_of
from tests.distributed.pool import ProcessPool

# Seconds by samples and tokens: 1 + 0.01 BS + 0.0001 BS².
TABLE = [
    {"outcome": "measured", "samples": b, "sequence_length": s, "seconds": 1 + 0.01 * b * s + 1e-4 * b * s * s}
    | {"spread": 0.0}
    for b, s in ((1, 100), (2, 100), (4, 100), (1, 200), (2, 200), (1, 400), (2, 400))
] + [{"outcome": "out_of_memory", "samples": 4, "sequence_length": 400, "seconds": None, "spread": None}]
COSTS = ReplayedCosts.of_rows(TABLE)
SHORT, MIDDLE, LONG = 3.0, 7.0, 21.0  # one sample of 100, 200 and 400 tokens

# One step of two ranks and two micro-batches: the first rank is the slower one first, then the other.
SAMPLES, LENGTHS, COUNTS = [[[1, 1], [1, 1]]], [[[200, 100], [100, 400]]], [[[1, 1], [1, 0]]]
STEP: dict[Waits, float] = {
    "steps": SHORT + LONG,
    "slots": MIDDLE + LONG,
}


def replay(waits: Waits) -> Replay:
    return Replay(COSTS, COSTS.fit, waits)


@pytest.mark.parametrize("waits", STEP)
def test_a_step_takes_what_the_slowest_rank_does(waits: Waits) -> None:
    columns = replay(waits).steps(SAMPLES, LENGTHS, COUNTS, overhead=0.5)
    assert columns["compute"].ravel().tolist() == pytest.approx([MIDDLE, SHORT, SHORT, LONG])
    found = figures_of(columns, waits)
    step = STEP[waits] + 0.5
    assert found["step_seconds_median"] == pytest.approx(step)
    assert found["tokens_per_second"] == pytest.approx(400 / step), "fillers are no progress"
    assert found["cv_step_mean"] == pytest.approx(1 - (MIDDLE + SHORT) / (SHORT + LONG))
    assert found["cv_slot_mean"] == pytest.approx(np.mean([1 - SHORT / MIDDLE, 1 - SHORT / LONG]))
    behind = (2 * STEP[waits] - (MIDDLE + SHORT) - (SHORT + LONG)) / 2
    assert found["behind_slowest_share"] == pytest.approx(behind / step)


def test_noise_only_prolongs() -> None:
    noisy = ReplayedCosts.of_rows([row | {"spread": 0.3} for row in TABLE])
    quiet, loud = (
        Replay(noisy, noisy.fit).steps(np.ones((50, 2, 1)), np.full((50, 2, 1), 400), np.ones((50, 2, 1)), draws=draws)
        for draws in (None, np.random.default_rng(0))
    )
    ratio = loud["compute"] / quiet["compute"]
    assert ratio.min() >= 1 and ratio.max() <= 1.3 and ratio.mean() == pytest.approx(1.1, abs=0.03)


def test_a_plan_is_replayed_batch_by_batch() -> None:
    table = table_of([0] * 8 + [3] * 2)
    plan = BucketPlanner(table, BucketBudget(80, 80**2, 2.0), dp_size=2).plan(0)
    columns = replay("steps").of_plan(plan, overhead=0.0)
    assert (columns["samples"] * columns["counts"]).sum() == len(table)
    assert columns["compute"].shape == plan.grid.shape
    lengths = plan.table.sequence_lengths[plan.shape_id][plan.grid]
    assert np.array_equal(columns["sequence_length"], lengths)


def measured(factor: float, overhead: float, **named: Any) -> dict[str, Any]:
    """A run of the step above, whose micro-batches took a factor of the table's times."""
    columns = replay("steps").steps(SAMPLES, LENGTHS, COUNTS, overhead)
    columns |= {"compute": factor * columns["compute"], "total": factor * columns["total"]}
    usual = {"ranks": 2, "strategy": "ulysses_ddp", "ulysses_size": 1, "layers": 30, "draw": 0, "m_comp_of": "own"}
    return usual | {"m_comp_over_longest": 1.2} | row_of("planned", 2, columns) | named


def test_a_check_takes_what_comes_beside_micro_batches_from_the_other_runs() -> None:
    one = {"micro_batches": 1}
    rows = [measured(1.0, 0.5), measured(1.0, 1.0, **one), measured(1.0, 2.0, **one, draw=1)]
    found = list(checks(rows, TABLE, COSTS.fit, "steps"))
    assert [row["overhead_s"] for row in found] == pytest.approx([1.5, 2.0, 1.0])
    measured_steps, replayed_steps = [24.5, 25, 26], [25.5, 26, 25]
    errors = [m / r - 1 for m, r in zip(measured_steps, replayed_steps, strict=True)]
    assert [row["error"] for row in found] == pytest.approx(errors), "of tokens per second"
    errors = [r / m - 1 for m, r in zip(measured_steps, replayed_steps, strict=True)]
    assert [row["error_of_waits"] for row in found] == pytest.approx(errors), "of seconds"
    assert replay("slots").overhead(rows[1:], 4) == pytest.approx(4 * replay("slots").overhead(rows[1:], 1))
    assert next(checks([measured(1.1, 0.0)], TABLE, COSTS.fit, "steps"))["compute_over_table"] == pytest.approx(1.1)


def test_shapes_that_other_runs_have_seen_often_take_what_they_took_there() -> None:
    runs = [measured(factor, 0.0) for factor in (1.0, 1.1, 1.2, 9.0)]
    costs = replay_of(TABLE, runs, COSTS.fit, "steps", but=runs[-1]).costs
    short = [SHORT * factor for factor in (1.0, 1.1, 1.2)]  # on the second rank, which the first waits for
    assert costs.predict([1, 1, 2], [100, 200, 100]) == pytest.approx(
        [np.quantile(short, 0.25), MIDDLE, TABLE[1]["seconds"]], rel=1e-3
    )
    noise = costs.noise(np.ones(4000), np.full(4000, 100), np.random.default_rng(0))
    assert float(noise.mean() * costs.predict(1, 100)) == pytest.approx(float(np.mean(short)), rel=0.005)
    assert costs_of(TABLE, runs[:1], "steps").predict(1, 400) == pytest.approx(LONG), "seen once, which says little"
    in_slots = costs_of(TABLE, runs[:3], "slots")
    assert in_slots.predict([1, 1], [100, 200]) == pytest.approx([SHORT, MIDDLE * 1.05], rel=1e-3), (
        "the slowest of each"
    )


def test_a_rank_that_is_ahead_takes_longer_and_the_step_does_not() -> None:
    run = measured(1.0, 0.0)
    (first, _), second = run["micro_batch_seconds"][0]
    assert replay("steps").measure_ahead([run]) == 1.0, "where the host decides, it does not"
    ahead = [[[1], [1]]], [[[200], [400]]], [[[1], [1]]]
    one = run | dict(zip(("samples", "sequence_lengths", "counts"), ahead, strict=True))
    one["micro_batch_seconds"] = [[[first * 1.1], [second[1]]]]
    found = replay("steps")._replace(ahead=replay("steps").measure_ahead([one]))
    assert found.ahead == pytest.approx(1.1)
    assert found.steps(*ahead)["compute"].ravel().tolist() == pytest.approx([MIDDLE * 1.1, LONG])
    assert found.steps(*ahead)["total"].ravel().tolist() == pytest.approx([LONG, LONG])
    nearly = found.steps([[[1], [1]]], [[[390], [400]]], [[[1], [1]]])["compute"].ravel()
    assert nearly.tolist() == pytest.approx([LONG, LONG]), "no rank that is ahead becomes the slowest"
    assert replay("slots").measure_ahead([one]) == 1.0


def test_a_group_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [[[float(rank + 1)] * 3 + [2.0, 100.0, 5.0, 1.0]] for rank in range(4)]
    groups = of_groups(columns_of(ranks, k=1, warm_up=0), ranks=2)
    assert {name: groups[name].ravel().tolist() for name in ("compute", "samples")} == {
        "compute": [2, 4],
        "samples": [2, 2],
    }
    assert all(groups[name].shape == (1, 2, 1) for name in FIELDS)


def test_balances_take_turns() -> None:
    runs = runs_of(BALANCES, {1: 15}, ["own", "common"], [0, 1])
    assert [(run.balance, run.m_comp_of) for run in runs if run.draw == 0] == [
        ("equal_token", None),
        *(("dual_constraint", of) for of in ("own", "common")),
        *(("planned", of) for of in ("own", "common")),
    ]
    assert next(run.balance for run in runs if run.draw == 1) == "planned"
    assert [run.warm_up for run in runs_of(["planned"], {1: 15, 4: 5}, ["own"], [0])] == [2, 1]


def test_draws_share_no_clip_and_nothing_is_longer_than_asked_for() -> None:
    clips = footage()
    numbers = np.arange(len(clips))
    width, height = (np.where(numbers % 2, *sizes).astype(np.int32) for sizes in ((1280, 640), (720, 640)))
    apart = replace(clips, width=width, height=height)
    whole, *tables = (table_of_draw(apart, 500, draw) for draw in (None, 0, 1))
    shapes = [{(shape.height, shape.width) for shape in table.shapes} for table in tables]
    assert not shapes[0] & shapes[1] and shapes[0] | shapes[1] == {(s.height, s.width) for s in whole.shapes}
    short = table_of_draw(apart, 500, 0, longest=10_000)
    assert 0 < len(short) < len(tables[0]) and short.sequence_lengths.max() <= 10_000


def started(script: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    torch.multiprocessing.set_start_method("fork", force=True)  # of the loaders' workers, as in any script
    runpy.run_path(script, run_name="__main__")


@pytest.mark.full
def test_a_dry_run_goes_on_where_it_ended_and_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ProcessPool(2, with_children=True)

    def in_pool(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        *_, ranks, script = command
        assert ranks == "--nproc-per-node=2"
        pool.run(started, script, {name: value for name, value in env.items() if name.startswith("VIDEOSCALE_")})
        return SimpleNamespace(returncode=0)

    # Its ranks are forked from a process that has all modules imported; torchrun is in a test of its own.
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(run=in_pool))
    try:
        dry_runs(tmp_path, monkeypatch, capsys)
    finally:
        pool.stop()


def dry_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(script: ModuleType, *arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments), "--commit", "a"])
        script.main()

    shapes, output, replayed = tmp_path / "clips.csv", tmp_path / "balances.json", tmp_path / "replayed.json"
    clips = [f"{source},640,{360 + 120 * (n % 2)},24,{60 + 10 * n}" for n in range(20) for source in "ab"]
    shapes.write_text("\n".join(["source,width,height,fps,num_frames", *clips]))
    tiny: list[str | Path] = ["--shapes", shapes, "--tiny", "--samples", "60", "--seconds", "0.01", "--output", output]
    some = ["--draws", "0", "--steps", "2", "--balances", "equal_token"]
    run(balances, *tiny, *some)
    begun = json.loads(output.read_text())
    run(balances, *tiny, *some, "planned")
    result = json.loads(output.read_text())
    assert result["settings"] == begun["settings"] and result["rows"][0] == begun["rows"][0]
    names = ("balance", "micro_batches", "strategy", "ulysses_size", "layers", "draw", "m_comp_of", "steps")
    assert [[row[name] for name in names] for row in result["rows"]] == [
        ["equal_token", 1, "ulysses_ddp", 1, 30, 0, None, 2],
        ["planned", 1, "ulysses_ddp", 1, 30, 0, "own", 2],
    ]
    with pytest.raises(SystemExit) as ended:
        run(balances, *tiny, *some, "planned")
    assert ended.value.code == 0
    with pytest.raises(SystemExit):
        run(balances, *tiny, *some, "--layers", "8")
    assert "holds runs of other layers: name another --output" in capsys.readouterr().err
    few: list[str | Path] = ["--ranks", "2", "8", "--micro-batches", "1", "--samples", "400", "--output", replayed]
    run(replayed_balances, output, "--shapes", shapes, *few)
    found = json.loads(replayed.read_text())
    assert found["settings"]["kind"] == "prediction"
    kinds = [row["kind"] for row in found["rows"]]
    assert kinds.count("check") == 2 and kinds.count("replay") == 2 * 2 * (1 + 2 * 2)  # ranks, draws, balances
