"""All tables of one node with several GPUs, by one command; at most 20 steps a cell.

    python benchmarks/node.py --shapes clips.csv             # columns source, width, height, fps, num_frames
    python benchmarks/node.py --shapes clips.csv --only layouts balances
    python benchmarks/node.py --shapes clips.csv --tiny --gpus 2 --folder /tmp/dry    # try the scripts on CPUs

Each table is a process of its own and a file named by the machine, such as ``parallel/layouts-h200x8.json``. One that
fails does not keep the others from running, and is named at the end. A call goes on where an earlier one was cut off:
tables that ended well are in ``node/tables-h200x8.json``, and of others only the cells that are missing are measured.
The tests are those of failures and of parity, of which ``parity of eight`` are those that take a node; how many ran is
in that file too, and which of them beside it, such as ``node/parity-h200x8.xml``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import provenance
from benchmarks.launch import say

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 60.0  # of a command that is given up; torchrun gives its ranks 30
PARITY, FAILURES = (f"tests/gpu/strategies/test_{name}_on_gpus.py" for name in ("wan_parity", "failures"))
SCALING = "benchmarks/parallel/strong_scaling.py"
# Clips that one GPU trains without checkpointing, and longer ones; a step of the longest takes one GPU 40 s.
LENGTHS: dict[str, tuple[str, ...]] = {
    "short": ("--tokens", "14040", "32760", "--warm-up", "5", "--steps", "15"),
    "long": ("--tokens", "75600", "--warm-up", "3", "--steps", "7", "--checkpointing"),
    "longest": ("--tokens", "151200", "--warm-up", "3", "--steps", "3", "--checkpointing"),
}


class Table(NamedTuple):
    """One table.

    Attributes:
        name: For ``--only``.
        file: What is written, room and name; several tables may have one.
        script: Which is run, with its arguments.
        is_launched: Whether torchrun starts it on all GPUs; else it does so itself.
    """

    name: str
    file: str
    script: tuple[str, ...]
    is_launched: bool = False


def tables(gpus: int, shapes: Path) -> Iterator[Table]:
    """What there is to measure on so many GPUs, what takes longest last."""
    pytest = ("-m", "pytest", "-q")
    yield Table("parity of eight", "node/parity_of_eight", (*pytest, PARITY, "-k", "eight"))
    yield Table("failures", "node/failures", (*pytest, FAILURES))
    yield Table("layouts", "parallel/layouts", ("benchmarks/parallel/layouts.py", "--fit"), True)
    ranks = ("--shapes", str(shapes), "--ranks", str(gpus))
    yield Table("suite", "suite/today", ("benchmarks/suite.py", *ranks))
    # Lengths, M_mem and M_comp are those of the predictions; a step of K = 4 takes 40 s.
    budget = ("--longest", "75600", "--m-mem", "2", "--m-comp", "1", "--m-comp-of", "common")
    steps = ("--draws", "0", "--micro-batches", "1", "4", "--steps", "18", "11")  # and those that warm up
    yield Table("balances", "data/balances", ("benchmarks/data/balances.py", *ranks, *budget, *steps))
    yield from scaling(gpus)
    yield Table("parity", "node/parity", (*pytest, PARITY))


def scaling(gpus: int) -> Iterator[Table]:
    """Whole steps: by layout, then by transport and schedule in one Ulysses group of all GPUs, in the same files."""
    split = sorted({(ulysses, gpus // ulysses) for ulysses in (gpus, gpus // 2, gpus // 4) if ulysses}, reverse=True)
    layouts = [f"{ulysses}x{ring}" for ulysses, ring in split] + ([f"{gpus // 2}x1"] if gpus > 2 else [])
    varied = {
        "": ("--layouts", *layouts, "auto"),
        ", exchange": (
            *("--layouts", f"{gpus}x1", "--transports", "collective", "symmetric"),
            *("--schedules", "serial", "overlap", "sliced", "auto"),
        ),
    }
    for suffix, variants in varied.items():
        for length, options in LENGTHS.items():
            for model in ("wan-1.3b", "wan-14b-8"):
                file = f"parallel/strong_scaling_{model.replace('.', '_').replace('-', '_')}_{length}"
                what = (SCALING, "--models", model, "--strategies", "ddp", "fsdp2", *options, *variants)
                yield Table(f"{model}, {length}{suffix}", file, what, True)


def machine() -> str:
    """By which result files are named."""
    return provenance.path("room", "name").stem.removeprefix("name-")


def command(table: Table, output: Path, options: argparse.Namespace) -> list[str]:
    """What runs a table."""
    if "pytest" in table.script:
        return [sys.executable, *table.script, f"--junit-xml={output}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    line = [sys.executable, *(launcher if table.is_launched else []), *table.script]
    return [*line, "--output", str(output), "--commit", options.commit, *(["--tiny"] if options.tiny else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="left out, all there are")
    parser.add_argument("--only", nargs="+", help="names of tables; left out, all that have not ended well yet")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a table is given up")
    parser.add_argument("--folder", type=Path, default=provenance.RESULTS, help="where files are written")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    parser.add_argument("--tiny", action="store_true", help="dry run with small shapes: nothing to publish")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    options = parser.parse_args()
    if options.gpus < 2:
        parser.error(f"{options.gpus} GPUs share nothing: name 2 or more with --gpus, and --tiny where there are none.")
    if (there := torch.cuda.device_count()) not in (0, options.gpus):
        parser.error(f"--gpus {options.gpus}, and there are {there}: hide the others by CUDA_VISIBLE_DEVICES.")
    options.shapes, options.folder = options.shapes.absolute(), options.folder.absolute()
    found = {table.name: table for table in tables(options.gpus, options.shapes)}
    if unknown := set(options.only or ()) - found.keys():
        parser.error(f"there are no tables {sorted(unknown)}, but {list(found)}.")
    options.commit = options.commit or provenance.commit()
    settings = {"dry_run": options.tiny, "ranks": options.gpus, "table": provenance.table(options.shapes)}
    ledger = options.folder / "node" / f"tables-{machine()}.json"
    ended = {row["table"]: row for row in _so_far(ledger, settings, parser)}
    for name in options.only or [name for name in found if ended.get(name, {}).get("exit_code") != 0]:
        suffix = "xml" if "pytest" in found[name].script else "json"
        output = options.folder / f"{found[name].file}-{machine()}.{suffix}"
        line = command(found[name], output, options)
        say(f"{name}: {' '.join(line)}")
        if not options.list:
            begin = time.monotonic()
            code = run(line, output, 60 * options.minutes)
            minutes = round((time.monotonic() - begin) / 60, 2)
            ended[name] = {"table": name, "exit_code": code, "minutes": minutes, **_tests(output)}
            provenance.write(ledger, "node", options.commit, settings, list(ended.values()))
    failed = [name for name in options.only or found if ended.get(name, {}).get("exit_code", 0) != 0]
    say(f"failed: {'; '.join(failed)}" if failed else "done")
    return len(failed)


def run(line: list[str], output: Path, seconds: float) -> int | None:
    """The exit code of a table's command, or None where it was given up.

    One that fails is run again while each run gets further than the one before: a cell that ended its process, for
    want of memory, does not keep the table from the others.
    """
    until, reached = time.monotonic() + seconds, _reached(output)
    while True:
        code = _run(line, until - time.monotonic())
        before, reached = reached, _reached(output)
        if not code or reached <= before:
            return code


def _reached(output: Path) -> int:
    """How many rows of a result file were begun, and how many ended, in one number."""
    if output.suffix != ".json" or not output.exists():
        return 0
    return sum(1 if "unfinished" in row else 2 for row in json.loads(output.read_text())["rows"])


def _tests(output: Path) -> dict[str, int]:
    """How many tests ran, if it was tests: of a package that is missing, they are skipped and nothing fails."""
    if output.suffix != ".xml" or not output.exists():
        return {}
    suite = ElementTree.parse(output).getroot()[0]
    return {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}


def _so_far(ledger: Path, settings: dict[str, Any], parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    if not ledger.exists():
        return []
    found = json.loads(ledger.read_text())
    if other := provenance.differences(found, "node", settings):
        parser.error(f"{ledger} is of other {', '.join(other)}: name another --folder.")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _run(line: list[str], seconds: float) -> int | None:
    """Runs a command to its end, or ends it with all that it has started."""
    started = time.monotonic()
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(process)
    except BaseException:  # such as Ctrl+C and SIGTERM, which do not reach another session
        _end(process)
        raise
    say(f"{'given up' if code is None else f'ended with {code}'} after {time.monotonic() - started:.0f} s")
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a command's session to end, upon which torchrun ends its ranks; what does not is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as `timeout` ends a call
    sys.exit(main())
