"""What the README tells a newcomer to type works as it stands, on a small model in the place of the large one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lightning_videoscale.cli import main
from tests.newcomer import blocks, commands, make_newcomers_folder, replaced
from tests.test_docs import results as rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GET_STARTED = (ROOT / "docs" / "get-started.md").read_text()
SMALLER = {"--sizes 480x832": "--sizes 32x48 --fps 25 --max-frames 9 --workers 0"}
ON_THIS_MACHINE = {"devices=4": 'accelerator="cpu", devices=1', "max_steps=10_000": "max_steps=2"}
FOR_A_MOMENT = {
    "max_steps=1000": 'max_steps=2, accelerator="cpu", devices=1',
    "height=480, width=832, num_frames=81": "height=32, width=48, num_frames=5, num_inference_steps=2",
}


def videoscale(command: str) -> None:
    smaller = replaced(command, SMALLER) if " encode " in command else command
    assert main(shlex.split(smaller)[1:]) == 0, command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_newcomers_folder(tmp_path_factory.mktemp("newcomer"))


def test_the_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command in commands(README):
        if command.startswith("videoscale "):
            videoscale(command)
    (script,) = blocks(README, "python")
    exec(replaced(script, ON_THIS_MACHINE), {"__name__": "__main__"})
    assert list(folder.glob("lightning_logs/version_0/report.html"))
    assert list(folder.glob("lightning_logs/version_0/checkpoints/*.ckpt"))


def test_from_ten_videos_to_a_sample_of_the_exported_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six commands and a file of at most 60 lines."""
    monkeypatch.chdir(folder)
    (script,) = blocks(GET_STARTED, "python")
    assert len(script.splitlines()) <= 60
    assert len(commands(GET_STARTED)) == 6
    for command in commands(GET_STARTED):
        if command.startswith("python wan_lora.py"):
            monkeypatch.setattr(sys, "argv", command.split()[1:])
            exec(replaced(script, FOR_A_MOMENT), {"__name__": "__main__"})
        elif command.startswith("videoscale "):  # the package is installed
            videoscale(command)
    with av.open(str(folder / "sample.mp4")) as sample:
        assert [(frame.height, frame.width) for frame in sample.decode(video=0)] == [(32, 48)] * 5


def longest(peaks: list[dict[str, Any]]) -> float:
    """Tokens whose peak is 40 GiB, by a line through those of four GPUs or one without checkpointing."""
    slope, start = np.polyfit([row["tokens"] for row in peaks], [row["peak_bytes"] for row in peaks], 1)
    return float((40 * 2**30 - start) / slope)


def test_its_figures_are_those_of_the_files() -> None:
    everything = [x["over_today"] for x in rows("suite/today-h200x2") if x["variant"] == "all" and "over_today" in x]
    runs = {(x["balance"], x["micro_batches"], x["draw"]): x for x in rows("data/balances-h200x2")}
    planned = runs["planned", 1, 0]
    step = {x["mode"]: x for x in rows("kernels/wan_step-h200") if x["model"] == "Wan-1.3B"}
    eager, fused = step["eager"], step["fused"]
    memory = [
        x for x in rows("parallel/activation_memory-h200x4") if "tokens" in x and not x["activation_checkpointing"]
    ]
    one, four = ([x for x in memory if x["ranks"] == n and x["transport"] == "collective"] for n in (1, 4))
    time, peak = (fused[name] / eager[name] for name in ("median_ms", "peak_bytes"))
    page = README.replace("\N{MULTIPLICATION SIGN}", "times")
    assert f"| {min(everything):.2f} times |" in page
    assert f"| {planned['over_equal_token']:.2f} times |" in page
    assert f"| {time:.2f} times, {peak:.2f} times |" in page
    assert f"| {longest(four) / longest(one):.1f} times |" in page


def test_the_first_page_is_short() -> None:
    assert len(README.split()) <= 700
