"""`videoscale plan --layout`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.parallel.layout import MACHINES, Layer, Layout, predict

WAN_1_3B = ("plan", "--layout", "--heads", "12", "--head-dim", "128", "--ranks", "8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_of_all_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *WAN_1_3B, "--tokens", "75600")
    assert found["chosen"] == {"ulysses": 4, "ring": 2} and found["machine"] == "h200"
    rows = {(row["ulysses"], row["ring"]): row for row in found["layouts"]}
    assert list(rows) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    expected = predict(Layer(12, 128, 75_600), Layout(4, 2), MACHINES["h200"])
    assert rows[4, 2]["total_ms"] == pytest.approx(1e3 * expected.total)
    assert rows[4, 2]["speed"] == pytest.approx(rows[8, 1]["total_ms"] / rows[4, 2]["total_ms"])

    assert main([*WAN_1_3B, "--tokens", "75600"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "chosen" in line]) == 1
    assert lines[-1].startswith("12 heads on 8 ranks: ulysses 4 x ring 2, predicted 1.")


def test_heads_from_a_config_and_lengths_from_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, shapes = tmp_path / "config.json", tmp_path / "clips.csv"
    config.write_text(json.dumps({"num_attention_heads": 40, "attention_head_dim": 128}))
    shapes.write_text("source,width,height,fps,num_frames\na,832,480,16,81\na,416,240,16,17\n")
    of_clips = run(capsys, "plan", "--layout", "--config", str(config), "--shapes", str(shapes), "--ranks", "4")
    assert (of_clips["heads"], of_clips["tokens"]) == (40, 32_760)
    assert run(capsys, "plan", "--layout", "--config", str(config), "--ranks", "4")["tokens"] == 32_760
    folder = ("plan", "--layout", "--config", str(config.parent), "--ranks", "4")
    assert run(capsys, *folder)["heads"] == 40
    # Ranks of two nodes keep Ulysses inside each.
    across = ("--ranks", "16", "--devices-per-node", "8")
    assert run(capsys, "plan", "--layout", "--config", str(config), *across)["chosen"] == {"ulysses": 8, "ring": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout"], "--heads"),
        (["--layout", "--heads", "12", "--machine", "abacus"], "'abacus'"),
        (["--layout", "--config", __file__], "num_attention_heads"),
        (["--layout", "--config", "/nowhere/config.json"], "/nowhere/config.json"),
    ],
)
def test_what_cannot_be_read(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_plan_needs_clips(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan"])
    assert "--shapes" in capsys.readouterr().err
