"""What all commands have in common: help at once, a version, and quiet ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.cli.parsers import plan as plan_arguments
from lightning_videoscale.data.planning import Balance
from lightning_videoscale.parallel.layout import DEFAULT_TOKENS
from lightning_videoscale.report import LOG_NAME, REPORT_NAME
from tests.data.clips import clip, write_shard
from tests.examples.footage import moving_square, write_video
from tests.scripts import printed_in, run_forked, start_forked

COMMANDS = ("doctor", "pack", "index", "encode", "benchmark-shapes", "plan", "report", "export")

HELP = """
import sys
from lightning_videoscale.cli import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("heavy:", *sorted({"torch", "lightning", "numpy", "scipy"} & set(sys.modules)))
"""

CALL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, ignore it
from lightning_videoscale.cli import main
sys.exit(main(sys.argv[1:]))
"""


CALL_FOR_NOBODY = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from lightning_videoscale.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", "videos", "s3://bucket/shards"],
        ["index", "0.tar", "--index=s3://bucket/index"],
        ["encode", "0.tar", "--output=s3://bucket/latents"],
        ["encode", "0.tar", "--output=latents", "--index=s3://bucket/index"],
    ],
)
def test_a_url_is_no_place_to_write_to(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "s3://bucket/" in capsys.readouterr().err


def test_what_is_written_from_home_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind ``--index=``, shells leave the ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "0.tar", [clip(0)])
    assert main(["index", "0.tar", "--index=~/kept"]) == 0
    assert (tmp_path / "home/kept.arrow").is_dir() and not (tmp_path / "~").exists()


def test_help_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *COMMANDS], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy:"
    assert all(f"usage: videoscale {command} " in done.stdout for command in COMMANDS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"videoscale {version('lightning-videoscale')}\n"


def test_a_command_is_needed_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in (([], 2), (["pak"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == status
    listed = capsys.readouterr().out
    assert [command for command in COMMANDS if f"    {command}" not in listed] == []


def test_names_of_balances_are_those_of_the_planner() -> None:
    assert set(plan_arguments.BALANCES) == set(get_args(Balance))


def test_help_names_what_the_commands_use(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("plan", [f"without any, {DEFAULT_TOKENS}"]), ("report", [REPORT_NAME, LOG_NAME])):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert all(name in said for name in names)


def test_who_reads_may_have_seen_enough(tmp_path: Path) -> None:
    (tmp_path / "clips.csv").write_text("source,width,height,fps,num_frames\n" + "a,320,240,16,40\n" * 20)
    script = tmp_path / "script.py"
    script.write_text(CALL_FOR_NOBODY)
    for option in ([], ["--json"]):
        said = run_forked(tmp_path, script, "plan", "--shapes", str(tmp_path / "clips.csv"), *option)
        assert said.stderr == ""


def test_ctrl_c_is_one_line_and_the_next_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(CALL)
    video = write_video(tmp_path / "a.mp4", moving_square(40, 96, 160)).read_bytes()
    long = [{"__key__": f"{number:05}", "mp4": video} for number in range(1500)]
    shards = [str(write_shard(tmp_path / f"{place}.tar", rows)) for place, rows in enumerate([long[:2], long])]
    index = tmp_path / "index"
    process = start_forked(tmp_path, script, "index", *shards, "--index", str(index), "--workers", "1")
    while "indexing: " not in printed_in(tmp_path).stderr:  # after two seconds of work
        assert process.is_alive()
        time.sleep(0.05)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 130
    said = printed_in(tmp_path).stderr
    assert said.endswith("\nvideoscale index: interrupted. Run it again to go on.\n")
    assert "Traceback" not in said
    assert not index.exists() and main(["index", shards[0], "--index", str(index)]) == 0
    assert capsys.readouterr().out.startswith("2 samples")
