"""A node's tables: each ends or is ended, one that fails is named, and a call goes on where an earlier one ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import node
from benchmarks.measured_code import MEASURES
from benchmarks.parallel.strong_scaling import Cell, Clips, compared, missing
from lightning_videoscale.strategies.mesh.division import KnowsClips

SLEEPS = """
import signal, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    open(sys.argv[1], "a").write("x")
    time.sleep(0.05)
"""

GETS_FURTHER = """
import json, pathlib, sys
file, last = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]), int(sys.argv[1])
file.parent.mkdir(exist_ok=True)
rows = [row for row in json.loads(file.read_text())["rows"] if not row] if file.exists() else []
rows += [{}] * (len(rows) < last)
file.write_text(json.dumps({"rows": rows + [{"unfinished": True}]}))
with file.with_suffix(".calls").open("a") as calls:
    calls.write("x")
sys.exit(len(rows) < 3)
"""

CELL = Cell("wan-1.3b", 32_760, "eager", "ddp", "8x1", "collective", "serial")


@pytest.mark.parametrize("hearing", ["deaf", "listens"])
def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearing: str) -> None:
    monkeypatch.setattr(node, "SECONDS_TO_END", 1.0)
    beats = tmp_path / "beats"
    begin = time.monotonic()
    assert node.run([sys.executable, "-c", SLEEPS, str(beats), hearing], tmp_path / "none.json", 1.0) is None
    assert time.monotonic() - begin < 20
    count = beats.stat().st_size
    assert count > 0
    time.sleep(0.3)
    assert beats.stat().st_size == count


def test_a_call_that_is_ended_ends_its_table(tmp_path: Path) -> None:
    """By the script itself, with a table of parity in which pytest collects a file that sleeps."""
    beats, shapes = tmp_path / "beats", tmp_path / "clips.csv"
    shapes.write_text("source\n")
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.argv = ['', {str(beats)!r}, 'listens']\n{SLEEPS}")
    line = [sys.executable, node.__file__, "--shapes", str(shapes), "--gpus", "8", "--folder", str(tmp_path)]
    options = {
        "PYTEST_ADDOPTS": f"-p conftest --rootdir={tmp_path}",
        "PYTHONPATH": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    call = subprocess.Popen([*line, "--commit", "a", "--only", "failures"], env=os.environ | options)
    begin = time.monotonic()
    while not beats.exists() and time.monotonic() - begin < 60:
        time.sleep(0.1)
    call.terminate()
    assert call.wait(30) == 128 + signal.SIGTERM
    count = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == count


def calls_of(folder: Path, last: int) -> tuple[int | None, int]:
    """The exit code of a table that gets to its third row or sooner no further, and how often it was run."""
    output = folder / "table.json"
    code = node.run([sys.executable, "-c", GETS_FURTHER, str(last), "--output", str(output)], output, 60)
    return code, len(output.with_suffix(".calls").read_text())


def test_a_table_that_fails_is_run_again_while_it_gets_further(tmp_path: Path) -> None:
    assert calls_of(tmp_path, last=3) == (0, 3)


def test_a_table_that_gets_no_further_has_failed(tmp_path: Path) -> None:
    assert calls_of(tmp_path, last=1) == (1, 2)


def test_a_second_call_runs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"right": 3, "wrong": 0}
    found = [node.Table(name, f"room/{name}", ("-c", GETS_FURTHER, str(last))) for name, last in files.items()]
    shapes = tmp_path / "clips.csv"
    shapes.write_text("source\n")
    monkeypatch.setattr(node, "tables", lambda gpus, shapes: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # as on any machine without GPUs
    monkeypatch.setitem(MEASURES, "node", ("lightning_videoscale/timing",))  # a fingerprint of all takes seconds
    arguments = ["--shapes", str(shapes), "--gpus", "8", "--folder", str(tmp_path), "--commit", "a"]
    monkeypatch.setattr(sys, "argv", ["node.py", *arguments])
    for _ in range(2):
        assert node.main() == 1
        assert "failed: wrong\n" in capsys.readouterr().out
    calls = {name: len(next((tmp_path / "room").glob(f"{name}-*.calls")).read_text()) for name in files}
    assert calls == {"right": 3, "wrong": 3}  # the latter twice, then once
    (ledger,) = (tmp_path / "node").glob("tables-*.json")
    rows = json.loads(ledger.read_text())["rows"]
    assert {row["table"]: row["exit_code"] for row in rows} == {"right": 0, "wrong": 1}
    monkeypatch.setattr(sys, "argv", ["node.py", *arguments, "--tiny"])
    with pytest.raises(SystemExit):
        node.main()
    assert "is of other dry_run: name another --folder" in capsys.readouterr().err


LAYOUTS = {8: "8x1 4x2 2x4 4x1 auto", 4: "4x1 2x2 1x4 2x1 auto", 2: "2x1 1x2 auto"}


@pytest.mark.parametrize(("gpus", "layouts"), LAYOUTS.items())
def test_a_cell_has_at_most_20_steps_in_every_layout(gpus: int, layouts: str) -> None:
    steps = [table.script for table in node.tables(gpus, Path("clips.csv")) if "--warm-up" in table.script]
    assert len(steps) == 12
    for script in steps:
        counts = [int(script[script.index(name) + 1]) for name in ("--warm-up", "--steps")]
        assert sum(counts) <= 20 and min(counts) >= 3  # graphs are captured by three
    lines = [" ".join(script) for script in steps]
    assert sum(f"--layouts {layouts}" in line for line in lines) == 6
    assert (
        sum(f"--layouts {gpus}x1 --transports collective symmetric --schedules serial" in line for line in lines) == 6
    )


def test_what_ended_its_process_is_left_for_last() -> None:
    cells = [CELL._replace(layout=layout) for layout in ("1x1", "8x1", "4x2", "2x4")]
    rows = [cells[0]._asdict() | {"unfinished": True}, cells[1]._asdict() | {"step_ms": 1.0}]
    assert missing(cells, rows) == [cells[2], cells[3], cells[0]]
    assert missing(cells[:2], [cells[0]._asdict() | {"refused": "no ring"}, rows[1]]) == []


def test_ratios_are_of_a_gpu_and_of_the_same_clip() -> None:
    """8 GPUs that share a clip and take a quarter of the time have half of one GPU's throughput."""
    alone = CELL.alone._asdict() | {"sp": 1, "step_ms": 1000.0}
    shared = CELL._asdict() | {"sp": 8, "step_ms": 250.0}
    faster = CELL._replace(layout="4x2")._asdict() | {"sp": 8, "step_ms": 200.0}
    halves = CELL._replace(layout="4x1")._asdict() | {"sp": 4, "step_ms": 500.0}
    graphs = CELL._replace(mode="graphs")._asdict() | {"sp": 8, "step_ms": 125.0}
    longer = CELL._replace(tokens=75_600)._asdict() | {"sp": 8, "step_ms": 1.0}
    found = compared([shared, faster, halves, graphs, longer, alone])  # whatever the order
    assert [row.get("per_gpu_over_whole_clips") for row in found] == [0.5, 0.625, 0.5, None, None, 1.0]
    assert [row["over_best"] for row in found] == [1.25, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found[3]["eager_over_this"] == 2.0


def test_a_strategy_is_told_how_long_the_clips_are() -> None:
    """By which ``auto`` chooses a layout; without it, all lengths would be divided as 32 760 tokens are."""
    clips = Clips(75_600, steps=3, tiny=False)
    told: object = clips
    assert isinstance(told, KnowsClips) and told.clip_lengths() == {75_600: 3}
    assert [batch[0].tolist() for batch in clips.train_dataloader()] == [[[21, 90, 160]]] * 3
