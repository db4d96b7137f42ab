"""`videoscale benchmark-shapes` on a LightningCLI config, and what reads its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from lightning_videoscale.cli import main
from lightning_videoscale.cost import ShapeMatrix
from lightning_videoscale.data import VideoDataModule
from tests.data.clips import write_shards


@pytest.fixture
def config(tmp_path: Path) -> Path:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    content = {
        "trainer": trainer | quiet,
        "model": {"class_path": "tests.cost.benchmark.flow.Flow"},
        "data": {"shards": write_shards(tmp_path, 24)},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_the_matrix_lies_where_auto_budgets_look(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark-shapes", "--config", str(config), "--seconds", "0.001", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = VideoDataModule(yaml.safe_load(config.read_text())["data"]["shards"])
    assert report["matrix"] == str(data.matrix_file)
    matrix = ShapeMatrix.load(data.matrix_file)
    assert {row.sequence_length for row in matrix.rows} == {4, 16, 48, 80}
    assert report["provenance"]["module"] == "tests.cost.benchmark.flow.Flow"
    assert "peaks" in report["memory"]  # none on a CPU


def test_a_table_and_a_place_for_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(config.read_text())
    del content["model"]  # its arguments have defaults, so that `fit` needs none
    config.write_text(yaml.safe_dump(content))
    arguments = ["benchmark-shapes", "--config", str(config), "--seconds", "0.001", "--max-shapes", "2"]
    arguments += ["--max-tokens", "80", "--output", str(tmp_path / "here.json")]
    assert main([*arguments, "--model", "tests.cost.benchmark.flow.Small", "--", "--model.tokens", "60"]) == 0
    out = capsys.readouterr().out
    assert "out of memory" in out and "here.json" in out
    assert [row.outcome for row in ShapeMatrix.load(tmp_path / "here.json").rows] == ["measured"] * 2 + [
        "out_of_memory"
    ] * 2


def test_modules_of_the_working_directory_are_found_by_a_config_in_another(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"] = [{"class_path": "my_callback.Mine"}]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "my_callback.py").write_text("import lightning.pytorch as pl\n\n\nclass Mine(pl.Callback):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    arguments = ["--seconds", "0.001", "--max-shapes", "2", "--json"]
    assert main(["benchmark-shapes", "--config", "configs/train.yaml", *arguments]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {}}, "name it with --model package.Class"),
        ({"model": None}, "name it with --model package.Class"),
        ({"data": None}, "is no config of LightningCLI"),
    ],
)
def test_what_is_missing_is_said(
    config: Path, change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {k: v for k, v in (yaml.safe_load(config.read_text()) | change).items() if v is not None}
    config.write_text(yaml.safe_dump(content))
    assert main(["benchmark-shapes", "--config", str(config)]) == 1
    assert message in capsys.readouterr().err


def test_what_is_no_yaml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.yaml").write_text("trainer: [")
    assert main(["benchmark-shapes", "--config", str(tmp_path / "train.yaml")]) == 1
    assert "train.yaml is no YAML" in capsys.readouterr().err
