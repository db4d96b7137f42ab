"""`videoscale plan`."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.cost import BucketBudget, MatrixRow, Measurement, ShapeMatrix, StepTimeModel
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.loader import PlannedSampler
from lightning_videoscale.data.shards.indexing import build_index
from tests.data.clips import write_shards
from tests.data.planning.tables import footage

FRACTIONS = ("cv_step", "compute_cv", "cost_cv", "efficiency", "padding", "diversity")


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    clips, file = footage(), tmp_path / "clips.csv"
    with file.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["source", "clip", "width", "height", "fps", "num_frames"])
        for i in range(len(clips)):
            table.writerow([clips.source[i], i, clips.width[i], clips.height[i], clips.fps[i], clips.num_frames[i]])
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_balance_is_one_object_of_figures(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    mix = ("--shapes", shapes, "--standard-mix", "--dp-size", "16", "--samples", "20000")
    planned = run(capsys, *mix, "--balance", "planned", "--micro-batches", "4")
    assert planned["balance"] == "planned" and planned["samples"] == 20_000
    assert all(0 <= planned[name] <= 1 for name in FRACTIONS)
    assert planned["cost_cv"] < 0.01 and planned["delay_p99"] < 30
    assert run(capsys, *mix, "--balance", "planned", "--micro-batches", "4") == planned
    other = run(capsys, *mix, "--balance", "planned", "--micro-batches", "4", "--seed", "1")
    assert other["samples"] == 20_000 and other != planned


def test_without_a_balance_all_three_are_compared(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "--shapes", shapes, "--dp-size", "4")
    assert list(rows) == ["equal_token", "dual_constraint", "planned"]
    assert {row["samples"] for row in rows.values()} == {3000}, "without the mix, every clip of the table once"
    assert rows["planned"]["efficiency"] > rows["equal_token"]["efficiency"]
    assert main(["plan", "--shapes", shapes, "--dp-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "3000 samples" in printed and "cost CV" in printed
    bars = printed.splitlines()[-1].split()
    assert bars[0] == "planned" and len(bars[1]) == 4 and set(bars[1]) <= set("▅▆▇█")


def test_equal_costs_or_diverse_steps_go_first_and_both_are_shown(
    shapes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = ("--shapes", shapes, "--standard-mix", "--dp-size", "256", "--samples", "50000", "--balance", "planned")
    equal, diverse = run(capsys, *mix), run(capsys, *mix, "--min-diversity", "0.8")
    assert equal["diversity"] < 0.75 and diverse["diversity"] == pytest.approx(0.8, abs=0.05)
    assert equal["cost_cv"] < diverse["cost_cv"] and equal["tokens_per_cost"] > diverse["tokens_per_cost"]
    assert main(["plan", *mix]) == 0
    printed = capsys.readouterr().out
    both = [line for line in printed.splitlines() if "equal costs first" in line or "--min-diversity 0.8" in line]
    for row, figures in zip(both, (equal, diverse), strict=True):
        for name in ("efficiency", "cv_step", "diversity", "tokens_per_cost"):
            assert f"{figures[name]:.4g}" in row
    assert main(["plan", *mix, "--min-diversity", "0.8"]) == 0
    assert "equal costs first" not in capsys.readouterr().out, "it was chosen"
    for nonsense in ("1.5", "much", "nan"):
        with pytest.raises(SystemExit):
            main(["plan", *mix, "--min-diversity", nonsense])
        assert repr(nonsense) in capsys.readouterr().err


def test_budgets_and_a_measured_model_are_taken(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [Measurement(b, s, 0.1 + b * s**1.9 * 1e-9) for b in (1, 2) for s in (500, 2000, 8000, 32_000)]
    model = StepTimeModel.fit(measured)
    (tmp_path / "cost.json").write_text(json.dumps(model.to_dict()))
    mix = ("--shapes", shapes, "--standard-mix", "--samples", "5000", "--balance", "dual_constraint")
    analytic = run(capsys, *mix)
    fitted = run(capsys, *mix, "--cost", str(tmp_path / "cost.json"))
    assert fitted["cost_cv"] != analytic["cost_cv"]
    rows = tuple(MatrixRow(1, 2, 2, b, s, seconds=seconds) for b, s, seconds, *_ in measured)
    ShapeMatrix(rows).save(tmp_path / "matrix.json")
    assert run(capsys, *mix, "--cost", str(tmp_path / "matrix.json")) == fitted
    small = run(capsys, *mix, "--m-mem", "1", "--m-comp", "1")
    assert small["steps"] == -(-5000 // 16), "nothing fits, so every sample is a micro-batch"
    assert small["padding"] > 0


def test_the_compute_budget_of_most_tokens_per_second_is_taken(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A quarter of the longest clip's time is there for every micro-batch: the fewer, the better.
    measured = [Measurement(b, s, 0.6 + b * s**1.9 * 1e-9) for b in (1, 2) for s in (4000, 8000, 32_000, 75_600)]
    (tmp_path / "cost.json").write_text(json.dumps(StepTimeModel.fit(measured).to_dict()))
    cost = ("--cost", str(tmp_path / "cost.json"), "--m-mem", "302400")
    mix = ("--shapes", shapes, "--standard-mix", "--samples", "5000", "--dp-size", "8", *cost)
    found = run(capsys, *mix, "--balance", "planned", "--best-m-comp")
    first, *others = found.pop("tried")
    assert len(others) > 3 and all(row["m_comp"] > first["m_comp"] for row in others)
    chosen = next(row for row in (first, *others) if row["m_comp"] == found["m_comp"])
    assert found["tokens_per_cost"] == chosen["tokens_per_cost"] > 1.01 * first["tokens_per_cost"]
    assert chosen["tokens_per_cost"] > 0.994 * max(row["tokens_per_cost"] for row in others)

    named = run(capsys, *mix, "--balance", "planned", "--m-comp", str(found.pop("m_comp")))
    assert named == found, "the same as of the option, and without it nothing else is printed"
    assert main(["plan", *mix, "--best-m-comp"]) == 0
    printed = capsys.readouterr().out
    assert "M_comp for planned, on 5000 of the samples" in printed and printed.count("chosen") == 1
    with pytest.raises(SystemExit):
        main(["plan", *mix, "--best-m-comp", "--m-comp", "1e7"])
    assert "--m-comp: not allowed with argument --best-m-comp" in capsys.readouterr().err


def test_of_a_handful_of_clips_the_figures_are_said_to_mean_little(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, said = tmp_path / "few.csv", "Figures of so few mean little: 10 samples make 2 steps"
    few.write_text("".join(Path(shapes).read_text().splitlines(keepends=True)[:11]))
    assert main(["plan", "--shapes", str(few), "--dp-size", "4"]) == 0
    assert said in capsys.readouterr().out
    assert main(["plan", "--shapes", shapes, "--dp-size", "4"]) == 0
    assert "mean little" not in capsys.readouterr().out


def test_a_budget_that_holds_planned_back_is_named(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [Measurement(b, s, 0.6 + b * s**1.9 * 1e-9) for b in (1, 2) for s in (4000, 8000, 32_000, 75_600)]
    (tmp_path / "cost.json").write_text(json.dumps(StepTimeModel.fit(measured).to_dict()))
    mix = ("--shapes", shapes, "--cost", str(tmp_path / "cost.json"), "--m-mem", "302400", "--dp-size", "1")
    for option, is_named in ((("--m-comp", "1e7"), True), (("--best-m-comp",), False)):
        assert main(["plan", *mix, *option]) == 0
        assert ("--best-m-comp tries larger" in capsys.readouterr().out) == is_named


def test_an_index_is_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = write_shards(tmp_path, 50)
    file = tmp_path / "index.jsonl"
    build_index([str(tmp_path / f"{i:03}.tar") for i in range(2)], file, workers=1)
    figures = run(capsys, "--index", str(file), "--balance", "planned", "--dp-size", "2", "--m-mem", "160")
    assert figures["samples"] == 50 and shards


def test_shards_are_planned_on_by_their_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, 50)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--index", "*.tar"]) == 1
    assert "videoscale index '*.tar'" in capsys.readouterr().err
    assert main(["index", "*.tar"]) == 0
    capsys.readouterr()
    for named in (["*.tar"], [str(tmp_path)], ["."], ["000.tar", "001.tar"]):  # the last as a shell makes it of *.tar
        figures = run(capsys, "--index", *named, "--balance", "planned", "--dp-size", "2", "--m-mem", "160")
        assert figures["samples"] == 50


def test_what_is_validated_on_too_is_planned_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, 50)
    monkeypatch.chdir(tmp_path)
    VideoDataModule("*.tar", val_shards="*.tar").prepare_data()
    assert run(capsys, "--index", "*.tar", "--balance", "planned", "--dp-size", "2", "--m-mem", "160")["samples"] == 50


def test_in_windows_the_figures_are_those_of_a_training_with_that_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, file = write_shards(tmp_path, 90, shards=6), tmp_path / "index.arrow"
    budget = {"m_mem": 320.0, "m_comp": 160.0**2}
    module = VideoDataModule(shards, index=file, window=25, budget=BucketBudget(**budget, p=2.0), micro_batches=2)
    module.prepare_data()
    module.setup("fit")
    module.train_dataloader()
    assert module.planner is not None
    model = StepTimeModel.fit([Measurement(b, s, 0.1 + b * s**2.0 * 1e-4) for b in (1, 2, 4) for s in (4, 16, 48, 80)])
    (tmp_path / "cost.json").write_text(json.dumps(model.to_dict()))
    law = BucketBudget(**budget, p=model.power_law.p)
    planner = replace(module.planner, dp_size=3, step_time=model, budget=law)
    costs = np.array([
        [m.meta.predicted_cost for m in PlannedSampler(planner, rank)] for rank in range(3)
    ]).reshape(3, -1, 2).sum(axis=2)  # fmt: skip

    arguments = ("--index", str(file), "--dp-size", "3", "--micro-batches", "2", "--cost", str(tmp_path / "cost.json"),
                 "--m-mem", "320", "--m-comp", str(budget["m_comp"]), "--balance", "planned")  # fmt: skip
    found = run(capsys, *arguments, "--window", "25")
    assert found["samples"] == 90 and found["steps"] == costs.shape[1]
    assert found["efficiency"] == pytest.approx(costs.mean(axis=0).sum() / costs.max(axis=0).sum())
    assert found["cost_cv"] == pytest.approx((costs.std(axis=0) / costs.mean(axis=0)).mean())
    assert run(capsys, *arguments, "--window", "90") == run(capsys, *arguments) != found
    assert main(["plan", *arguments, "--window", "25"]) == 0
    assert "90 samples in 4 windows" in capsys.readouterr().out
    assert run(capsys, *arguments[:-4], "--window", "25", "--best-m-comp")["planned"]["samples"] == 90


def test_one_shard_is_planned_on_by_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the shell makes of *.tar without quotes, where there is one."""
    write_shards(tmp_path, 5, shards=1)
    shard = str(tmp_path / "000.tar")
    assert main(["plan", "--index", shard]) == 1
    assert "has no index yet" in capsys.readouterr().err
    assert main(["index", shard]) == 0
    capsys.readouterr()
    assert run(capsys, "--index", shard, "--balance", "planned", "--dp-size", "1", "--m-mem", "160")["samples"] == 5


def test_what_cannot_be_planned_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.csv").write_text("source,width,height,fps,num_frames\na,4,4,25,100\n")
    assert main(["plan", "--shapes", str(tmp_path / "tiny.csv")]) == 1
    assert "None of the 1 clips" in capsys.readouterr().err
    assert main(["plan", "--shapes", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err
    assert main(["plan", "--index", str(tmp_path / "*.tar")]) == 1
    assert "No shards found" in capsys.readouterr().err
    (tmp_path / "one.csv").write_text("source,width,height,fps,num_frames\na,640,480,25,100\n")
    assert main(["plan", "--shapes", str(tmp_path / "one.csv"), "--dp-size", "0"]) == 1
    assert "dp_size=0" in capsys.readouterr().err
    assert np.isfinite(run(capsys, "--shapes", str(tmp_path / "one.csv"))["planned"]["efficiency"])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (b"\xef\xbb\xbfsource,width,height,fps,num_frames\na,640,480,25,100\n", ""),
        (b"source,width,height,fps,num_frames\n\xe9,640,480,25,100\n", "is not UTF-8 text"),
        (b"source,width,height,fps,num_frames\na,640,1e12,25,100\n", "row 1 has width, height, fps, num_frames"),
        (b"source,width,height,fps,num_frames\na,640,nan,25,100\n", "row 1 has width, height, fps, num_frames"),
    ],
)
def test_tables_as_spreadsheets_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: bytes, said: str
) -> None:
    (tmp_path / "clips.csv").write_bytes(table)
    assert main(["plan", "--shapes", str(tmp_path / "clips.csv"), "--json"]) == bool(said)
    assert said in capsys.readouterr().err


def test_options_that_make_no_sense_are_named(shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (
        ("--samples", "-5"),
        ("--samples", "0"),
        ("--seed", "-1"),
        ("--window", "1.5"),
        ("--seed", "one"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", "--shapes", shapes, option, value])
        assert f"argument {option}: '{value}'" in capsys.readouterr().err
    for others in (("--shapes", shapes), ("--index", shapes, "--standard-mix")):
        with pytest.raises(SystemExit):
            main(["plan", *others, "--window", "1000"])
        assert "--window 1000" in capsys.readouterr().err
    for content in ("[1]", '{"a": 1}', "no JSON"):
        (tmp_path / "cost.json").write_text(content)
        assert main(["plan", "--shapes", shapes, "--cost", str(tmp_path / "cost.json")]) == 1
        assert "`videoscale benchmark-shapes`" in capsys.readouterr().err
