"""Finds the best launch of qk_norm_rope's CUDA kernels, by share of the bandwidth of a device copy of as many bytes.

    python -m benchmarks.kernels.sweep_qk --seconds 120 --output sweep_qk.json

First every family's variant is checked against float64. Then each candidate launch for the sizes of Wan and LTX-Video
(RMS over all heads, interleaved; LTX-Video's tables differ by head) is checked, compared with itself bitwise and
screened at one N, and the best are timed at every N, with L2 flushed and the host far ahead. Printed: the best per N,
and the lines that belong into `MEASURED` of ``kernels/cuda/head_tuning.py``. A kernel that hangs ends the run; results
so far are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.qk_cases import Problem, exact, largest_error, runner
from benchmarks.kernels.row_cases import Clock, poison
from benchmarks.kernels.sweep_rows import Watchdog, compile_one
from lightning_videoscale.kernels.cuda.head_kernels import HeadKernels, constants, stage_bytes, together, vectors
from lightning_videoscale.kernels.cuda.head_tuning import HeadTuning, tuning_for
from lightning_videoscale.kernels.cuda.row_variant import Direction
from lightning_videoscale.kernels.cuda.toolkit import CudaUnavailableError
from lightning_videoscale.kernels.head_types import HeadOp, HeadVariant

LENGTHS, SCREENED_AT = (16384, 65536), 16384
SHARED_PER_SM, SHARED_PER_BLOCK = 227 * 1024, 226 * 1024
ACROSS_HEADS = HeadOp("rms", False, "interleaved", False)
# Heads, their channels, and whether each has tables of its own.
SIZES = {"wan2.1-14b": (40, 128, False), "wan2.2-5b": (24, 128, False), "wan2.1-1.3b": (12, 128, False),
         "ltx-video": (32, 64, True)}  # fmt: skip
OTHERS = {
    "HunyuanVideo": (HeadOp("rms", True, "interleaved", True), 24, 128),
    "Cosmos": (HeadOp("rms", True, "half", True), 32, 128),
    "CogVideoX": (HeadOp("layer", True, "interleaved", False), 48, 64),
}


def problem_of(name: str, n: int) -> Problem:
    heads, head_dim, table_heads = SIZES[name]
    return Problem(ACROSS_HEADS, heads, head_dim, n, table_heads)


def variant(name: str, direction: Direction) -> HeadVariant:
    heads, head_dim, table_heads = SIZES[name]
    sides = torch.bfloat16, torch.bfloat16, False, (heads, heads), head_dim
    return HeadVariant(ACROSS_HEADS, direction, *sides, head_dim // 2, table_heads, 2, (0, 1))


def candidates(made: HeadVariant) -> list[HeadTuning]:
    """The launches worth trying: enough bytes on their way, registers and shared memory that there are."""
    found = []
    lag = 0 if together(made) and not made.table_heads else 1  # stages that are held and not on their way
    for own, blocks, stages in itertools.product((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 8, 10), (2, 3, 4, 6)):
        threads, ring = vectors(made) // own, stages * stage_bytes(made)
        if vectors(made) % own or threads % 32 or threads > 1024 or ring > SHARED_PER_BLOCK:
            continue
        registers = 48 + 26 * own
        if not 192 <= threads * blocks <= 65536 // registers:
            continue
        on_the_way = blocks * (stages - lag) * stage_bytes(made)
        if blocks * (ring + 2048) <= SHARED_PER_SM and 60 * 1024 <= on_the_way <= 200 * 1024:
            found.append(HeadTuning(threads, stages, blocks))
    return found


def compile_all(
    work: list[tuple[HeadVariant, HeadTuning]], arch: str, deadline: float
) -> list[tuple[HeadVariant, HeadTuning]]:
    """Fills the cache; returns what was compiled in time."""
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork"))
    futures = {
        pool.submit(compile_one, f"qk_{made.direction}.cuh", constants(made) | tuning.constants(), arch): (
            made,
            tuning,
        )
        for made, tuning in work
    }
    done = set()
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            if future.exception() is None:
                done.add(futures[future])
            else:
                print(f"NOT COMPILED {futures[future]}: {str(future.exception())[:500]}", flush=True)
    except TimeoutError:
        print(f"Compiled {len(done)} of {len(work)} in time.", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return [item for item in work if item in done]


def check_families(watchdog: Watchdog) -> None:
    """Both directions, against float64."""
    problems = {name: problem_of(name, 1031) for name in SIZES}
    problems |= {name: Problem(op, heads, dh, 1031) for name, (op, heads, dh) in OTHERS.items()}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for (name, problem), direction in itertools.product(problems.items(), directions):
        expected = exact(problem, direction)
        watchdog.report(f"checking {name} {direction}")
        error = largest_error(runner(problem, direction, None)(), expected)
        print(f"{'ok ' if error < 5e-3 else 'BAD'} {name:14} {direction:8} error {error:.1e}", flush=True)


def screen(
    name: str, direction: Direction, tunings: list[HeadTuning], clock: Clock, watchdog: Watchdog, deadline: float
) -> list[tuple[float, HeadTuning, HeadKernels]]:
    """Checks every launch, times it, and returns the best three and the rule's own."""
    made = variant(name, direction)
    row = vectors(made), made.table_heads, stage_bytes(made)
    default = tuning_for(direction, together(made), *row, SHARED_PER_BLOCK)
    assert default is not None
    small, large = (problem_of(name, n) for n in (1031, SCREENED_AT))
    expected, screened = exact(small, direction), []
    for tuning in [default, *(t for t in tunings if t != default)]:
        if time.monotonic() > deadline:
            print(f"  screening of {name} {direction} stopped after {len(screened)} launches", flush=True)
            break
        watchdog.report(f"running {name} {direction} with {tuning}")
        poison(64 << 20)
        try:
            kernels = HeadKernels(made, 0, tuning)
            run = runner(small, direction, kernels)
            got, again = run(), run()
        except CudaUnavailableError as refused:
            print(f"  REFUSED {tuning}: {refused}", flush=True)
            continue
        error = largest_error(got, expected)
        if error > 5e-3 or not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            print(f"  WRONG {name} {direction}, {tuning}: error {error:.1e}", flush=True)
            continue
        screened.append((clock(runner(large, direction, kernels), 7), tuning, kernels))
    best = sorted(screened, key=lambda entry: entry[0])[:3]
    return best + [entry for entry in screened if entry[1] == default and entry not in best]


def time_one(problem: Problem, direction: Direction, run: Callable[[], object], clock: Clock) -> dict[str, Any]:
    microseconds, copy = clock(run, 21), clock.copy(problem.bytes(direction), 21)
    d = problem.heads * problem.head_dim
    return {"direction": direction, "d": d, "n": problem.n, "microseconds": microseconds, "share": copy / microseconds}


def sweep(sizes: Sequence[str], arch: str, deadline: float, output: Path) -> None:
    """Compiles, checks, screens and times; writes rows as they come and prints the best."""
    begun = time.monotonic()
    directions: tuple[Direction, ...] = ("forward", "backward")
    cases = [(name, direction) for name in sizes for direction in directions]
    work = [(variant(*case), tuning) for case in cases for tuning in candidates(variant(*case))]
    compiled = compile_all(work, arch, begun + 0.4 * (deadline - begun))
    print(f"compiled {len(compiled)} of {len(work)} launches in {time.monotonic() - begun:.0f} s", flush=True)
    watchdog, clock, rows, table = Watchdog(40), Clock(held_back=True), list[dict[str, Any]](), []
    check_families(watchdog)
    for number, (name, direction) in enumerate(cases):
        mine = [tuning for made, tuning in compiled if made == variant(name, direction)]
        share = (deadline - time.monotonic()) / (len(cases) - number)
        best = screen(name, direction, mine, clock, watchdog, time.monotonic() + 0.6 * share)
        timed = []
        for n, (_, tuning, kernels) in itertools.product(LENGTHS, best):
            watchdog.report(f"timing {name} {direction} with {tuning} at N = {n}")
            problem = problem_of(name, n)
            row = time_one(problem, direction, runner(problem, direction, kernels), clock)
            timed.append(row | {"tuning": tuple(tuning), "registers": kernels.kernel.attribute("NUM_REGS")})
        rows += timed
        output.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
        table.append(report(timed, variant(name, direction)))
    print("\n".join(table), flush=True)
    time_others(clock, watchdog)


def report(timed: list[dict[str, Any]], made: HeadVariant) -> str:
    """Prints the best launch per N; returns the line of `MEASURED` of the one whose worst share from 16 384 is best."""
    for n in LENGTHS:
        best = max((row for row in timed if row["n"] == n), key=lambda row: row["share"])
        met = "ok " if best["share"] >= 0.85 or n < 16384 else "LOW"
        print(f"{met} {best['direction']:8} D={best['d']} N={n:5} {100 * best['share']:5.1f} % of copy "
              f"{best['microseconds']:7.1f} us {best['tuning']} {best['registers']} regs", flush=True)  # fmt: skip
    worst: dict[tuple[int, ...], float] = {}
    for row in timed:
        if row["n"] >= 16384:
            worst[row["tuning"]] = min(worst.get(row["tuning"], 9.0), row["share"])
    chosen = max(worst, key=lambda tuning: worst[tuning])
    shares = [round(100 * row["share"], 1) for row in timed if row["tuning"] == chosen]
    key = made.direction, together(made), vectors(made), made.table_heads
    return f"    {key}: HeadTuning{chosen},  # {shares} %"


def time_others(clock: Clock, watchdog: Watchdog) -> None:
    """Norms per head by the rule's launch."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    for (name, (op, heads, dh)), direction in itertools.product(OTHERS.items(), directions):
        watchdog.report(f"timing {name} {direction}")
        problem = Problem(op, heads, dh, 32768)
        row = time_one(problem, direction, runner(problem, direction, None), clock)
        print(f"    {name:14} {direction:8} D={row['d']} N={row['n']} {100 * row['share']:5.1f} % of copy", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON of everything that was timed")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    sweep(arguments.sizes, arguments.arch, time.monotonic() + arguments.seconds - 20, arguments.output)
    os._exit(0)  # The watchdog and unfinished compilations need not be waited for.


if __name__ == "__main__":
    main()
