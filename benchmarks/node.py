"""All tables of one node with several GPUs, by one command; at most 20 steps a cell.

    python benchmarks/node.py --shapes clips.csv             # columns source, width, height, fps, num_frames
    python benchmarks/node.py --shapes clips.csv --only layouts balances
    python benchmarks/node.py --shapes clips.csv --tiny --gpus 2 --folder /tmp/dry    # try the scripts on CPUs

Each table is a process of its own and a file named by the machine, such as ``parallel/layouts-h200x8.json``. One that
fails does not keep the others from running, and is named at the end. The tests are those of parity and of failures.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import provenance
from benchmarks.launch import say

ROOT = Path(__file__).parents[1]
SECONDS_TO_END = 60.0  # of a command that is given up; torchrun gives its ranks 30
PARITY = ("tests/gpu/strategies/test_wan_parity_on_gpus.py", "tests/gpu/strategies/test_failures_on_gpus.py")


class Table(NamedTuple):
    """One table.

    Attributes:
        name: For ``--only``.
        file: What is written, without the machine's name; None: nothing.
        script: Which is run, with its arguments.
        is_launched: Whether torchrun starts it on all GPUs; else it does so itself.
    """

    name: str
    file: str | None
    script: tuple[str, ...]
    is_launched: bool = False


def tables(gpus: int, shapes: Path) -> Iterator[Table]:
    """What there is to measure on so many GPUs."""
    split = sorted({(ulysses, gpus // ulysses) for ulysses in (gpus, gpus // 2, gpus // 4) if ulysses}, reverse=True)
    layouts = [f"{ulysses}x{ring}" for ulysses, ring in split]
    halves = [f"{gpus // 2}x1"] if gpus > 2 else []
    scaling = ("benchmarks/parallel/strong_scaling.py", "--steps", "15")  # and five that warm up
    short, long = ("--tokens", "14040", "32760"), ("--tokens", "75600", "151200", "--checkpointing")
    for model in ("wan-1.3b", "wan-14b-8"):
        for name, lengths in (("short", short), ("long", long)):
            options = ("--models", model, "--layouts", *layouts, *halves, "auto", "--strategies", "ddp", "fsdp2")
            file = f"strong_scaling_{model.replace('.', '_').replace('-', '_')}_{name}"
            yield Table(f"{model}, {name}", file, (*scaling, *options, *lengths), True)
    exchange = ("--transports", "collective", "symmetric", "--schedules", "serial", "sliced", "--modes", "eager")
    yield Table("exchange", "strong_scaling_exchange", (*scaling, *exchange, *short), True)
    yield Table("layouts", "layouts", ("benchmarks/parallel/layouts.py", "--fit"), True)
    ranks = ("--shapes", str(shapes), "--ranks", str(gpus))
    balances = ("benchmarks/data/balances.py", *ranks, "--layers", "30", "--max-steps", "20")
    yield Table("balances", "balances", balances)
    yield Table("suite", "suite", ("benchmarks/suite.py", *ranks, "--steps", "16"))  # and four that warm up
    yield Table("tests", None, ("-m", "pytest", "-q", *PARITY))


def command(table: Table, options: argparse.Namespace, commit: str) -> list[str]:
    """What runs a table."""
    if table.file is None:
        return [sys.executable, *table.script]
    room = {"balances": "data", "suite": "suite"}.get(table.file, "parallel")
    machine = provenance.path("room", "name").stem.removeprefix("name-")
    output = options.folder / room / f"{table.file}-{machine}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    line = [sys.executable, *(launcher if table.is_launched else []), *table.script]
    return [*line, "--output", str(output), "--commit", commit, *(["--tiny"] if options.tiny else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="left out, all there are")
    parser.add_argument("--only", nargs="+", help="names of tables; left out, all")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a table is given up")
    parser.add_argument("--folder", type=Path, default=provenance.RESULTS, help="where files are written")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    parser.add_argument("--tiny", action="store_true", help="dry run with small shapes: nothing to publish")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    options = parser.parse_args()
    if options.gpus < 2:
        parser.error(f"{options.gpus} GPUs share nothing: name 2 or more with --gpus, and --tiny where there are none.")
    options.shapes, options.folder = options.shapes.absolute(), options.folder.absolute()
    found = {table.name: table for table in tables(options.gpus, options.shapes)}
    if unknown := set(options.only or ()) - found.keys():
        parser.error(f"there are no tables {sorted(unknown)}, but {list(found)}.")
    commit = options.commit or provenance.commit()
    failed = []
    for name in options.only or found:
        line = command(found[name], options, commit)
        say(" ".join(line))
        if not options.list and not _runs(line, 60 * options.minutes):
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "done")
    return len(failed)


def _runs(line: list[str], seconds: float) -> bool:
    """Runs a command to its end, or ends it with all that it has started."""
    started = time.monotonic()
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(process)
    except BaseException:  # such as Ctrl+C, which does not reach another session
        _end(process)
        raise
    say(f"{'given up' if code is None else f'ended with {code}'} after {time.monotonic() - started:.0f} s")
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a command's session to end, upon which torchrun ends its ranks; what does not is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


if __name__ == "__main__":
    sys.exit(main())
