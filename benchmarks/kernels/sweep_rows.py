"""Finds the best launch of every CUDA row kernel, by share of the bandwidth of a device copy of as many bytes.

    python -m benchmarks.kernels.sweep_rows --seconds 240 --output sweep.json

Before anything is timed, each candidate must agree with float64 on random data, its outputs poisoned before. Candidates
are compiled by a pool of processes, screened at one N (backward in clusters of `CLUSTER`), the best of them also tried
with other ways to share the rows and other clusters, and the best of all timed at every N. L2 is flushed between
repeats. The table at the end and the JSON hold, for each (operation, direction, D, N), the best launch; the last lines
are what belongs into `MEASURED` of ``kernels/cuda/row_tuning.py``: per (operation, direction, D) the launch whose worst
share of its goal over the Ns is best. A kernel that hangs ends the run with a message; results so far are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.row_cases import CHANNELS, LENGTHS, OPERATIONS, Case, Clock, Data, largest_error, poison
from lightning_videoscale.kernels.cuda import compile as nvrtc
from lightning_videoscale.kernels.cuda import rows as cuda_rows
from lightning_videoscale.kernels.cuda.row_kernels import RowKernels
from lightning_videoscale.kernels.cuda.row_tuning import RowTuning, tuning_for
from lightning_videoscale.kernels.cuda.row_variant import bytes_per_row, constants, vectors
from lightning_videoscale.kernels.cuda.toolkit import CudaUnavailableError

SCREENED_AT, CLUSTER = 16384, 4
SHARED_PER_SM, SHARED_PER_BLOCK = 227 * 1024, 227 * 1024 - 4096


def candidates(case: Case) -> list[RowTuning]:
    """The launches worth trying: enough bytes on their way, not more threads or shared memory than there are.

    A first sweep of three times as many found the best where a multiprocessor holds 256 to 384 threads, up to 640 where
    nothing is normed.
    """
    row_vectors, row_bytes = vectors(case.variant), bytes_per_row(case.variant, case.direction)
    most_threads = 640 if case.op.residual and (case.op.norm is None or case.direction == "backward") else 384
    found = []
    for own, rows, blocks, stages, how in itertools.product(
        (1, 2, 3, 4, 5, 6), (1, 2, 4), (1, 2, 3, 4, 6, 8), (2, 3, 4, 6), (True, False)
    ):
        threads = row_vectors // own
        if row_vectors % own or threads % 32 or threads > 768:
            continue
        ring, on_the_way = stages * rows * row_bytes, blocks * rows * row_bytes * (stages - 1)
        if ring > SHARED_PER_BLOCK or blocks * (ring + 2048) > SHARED_PER_SM:
            continue
        registers = 65536 // (threads * blocks)
        sums = 24 if case.direction == "backward" and case.op.norm else 8
        needed = 40 + own * (sums + (16 if case.op.residual else 8) + (8 * rows if case.direction == "forward" else 16))
        if needed > min(registers, 255) * 1.1 or not 256 <= threads * blocks <= most_threads:
            continue
        if not 40 * 1024 <= on_the_way <= 150 * 1024 or (rows == 4 and own > 2):
            continue
        found.append(
            RowTuning(threads, stages, rows, blocks, how, cluster=CLUSTER if case.direction == "backward" else 1)
        )
    return found


class Watchdog:
    """Ends the process when nothing was reported for some time: a kernel hangs, and so would every later call."""

    def __init__(self, patience: float) -> None:
        self._patience, self._last, self._doing = patience, time.monotonic(), "starting"
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self, doing: str) -> None:
        self._last, self._doing = time.monotonic(), doing

    def _watch(self) -> None:
        while time.monotonic() - self._last < self._patience:
            time.sleep(0.5)
        print(f"HANG: nothing for {self._patience:.0f} s while {self._doing}", flush=True)
        os._exit(3)


def compile_one(source: str, constants: dict[str, str | int], arch: str) -> None:
    nvrtc.cubin(source, constants, arch)


def compile_all(work: list[tuple[Case, RowTuning]], arch: str, deadline: float) -> list[tuple[Case, RowTuning]]:
    """Fills the cache; returns what was compiled in time, in the order given."""
    context = multiprocessing.get_context("fork")  # No CUDA before this: children of a CUDA process cannot use it.
    done = set()
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=context)
    futures = {}
    for number, (case, tuning) in enumerate(work):
        macros = constants(case.variant) | tuning.constants()
        futures[pool.submit(compile_one, f"rows_{case.direction}.cuh", macros, arch)] = number
    try:
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            if future.exception() is None:
                done.add(futures[future])
            else:
                print(f"NOT COMPILED {work[futures[future]]}: {str(future.exception())[:500]}", flush=True)
    except TimeoutError:
        print(f"Compiled {len(done)} of {len(work)} in time.", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return [item for number, item in enumerate(work) if number in done]


def smoke(bulk: bool) -> None:
    """Runs one kernel; in a process of its own, so that a hang costs only that."""
    Watchdog(60)
    case = Case("norm_modulate", "backward", 5120)
    data = Data(case, 1031)
    tuning = RowTuning(320, 3, 2, 1, bulk)
    error = largest_error(data.run(cuda_rows, RowKernels(case.variant, "backward", 0, tuning)), data.expected())
    print(f"smoke bulk={bulk}: largest relative error {error:.1e}", flush=True)


def start_smoke(bulk: bool) -> subprocess.Popen[bytes]:
    """Starts `smoke` in a process that ends in any case."""
    how = "bulk" if bulk else "threads"
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kernels.sweep_rows", "--smoke", how, "--output", os.devnull]
    )


def sweep(cases: list[Case], arch: str, deadline: float, output: Path) -> list[dict[str, Any]]:
    """Compiles, checks, screens and times; one row per (case, N, launch) that was timed, written as they come."""
    begun, budget = time.monotonic(), deadline - time.monotonic()
    tried = {bulk: start_smoke(bulk) for bulk in (True, False)}
    # Round robin over the cases: if time runs short, each has had its share.
    by_case = [[(case, tuning) for tuning in candidates(case)] for case in cases]
    work = [item for turn in itertools.zip_longest(*by_case) for item in turn if item is not None]
    print(f"{len(work)} candidates of {len(cases)} kernels", flush=True)
    compiled = compile_all(work, arch, begun + 0.45 * budget)
    print(f"compiled {len(compiled)} in {time.monotonic() - begun:.0f} s", flush=True)
    runs = [bulk for bulk, process in tried.items() if process.wait() == 0]
    compiled = [(case, tuning) for case, tuning in compiled if tuning.bulk in runs]

    watchdog, clock, rows = Watchdog(30), Clock(), list[dict[str, Any]]()
    for number, case in enumerate(cases):
        mine = [tuning for other, tuning in compiled if other == case]
        share = (deadline - time.monotonic()) / (len(cases) - number)
        best = screen(case, mine, clock, watchdog, time.monotonic() + 0.6 * share)
        for n in LENGTHS:
            rows += time_at(case, n, best, clock, watchdog)
        output.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    return rows


Screened = tuple[float, RowTuning, RowKernels, float]


def screen(case: Case, tunings: list[RowTuning], clock: Clock, watchdog: Watchdog, deadline: float) -> list[Screened]:
    """Checks every launch against float64 and itself, times it, and returns the best eight and `tuning_for`'s own.

    The best four are also tried with a share of the rows for each block instead of turns, and in other clusters.
    """
    properties = torch.cuda.get_device_properties(0)
    default = tuning_for(case.variant, case.direction, (properties.major, properties.minor), SHARED_PER_BLOCK)
    assert default is not None
    checked, timed = Data(case, 1031), Data(case, SCREENED_AT)
    expected = checked.expected()

    def tried(tunings: list[RowTuning]) -> list[Screened]:
        screened: list[Screened] = []
        for tuning in tunings:
            if time.monotonic() > deadline:
                print(f"  {case}: screening stopped after {len(screened)} of {len(tunings)} launches", flush=True)
                break
            watchdog.report(f"running {case} {tuning}")
            poison(64 << 20)
            try:
                kernels = RowKernels(case.variant, case.direction, 0, tuning)
                got, again = checked.run(cuda_rows, kernels), checked.run(cuda_rows, kernels)
            except CudaUnavailableError as refused:
                print(f"  REFUSED {case} {tuning}: {refused}", flush=True)
                continue
            error = largest_error(got, expected)
            repeats = all(a is b or torch.equal(a, b) for a, b in zip(got, again, strict=True))  # type: ignore[arg-type]
            if error > 5e-3 or not repeats:
                how = "equal" if repeats else "DIFFER"
                print(f"  WRONG {case} {tuning}: error {error:.1e}, repeats {how}", flush=True)
                continue
            microseconds = clock(lambda kernels=kernels: timed.run(cuda_rows, kernels), 7)  # type: ignore[misc]
            screened.append((microseconds, tuning, kernels, error))
        return sorted(screened, key=lambda entry: entry[0])

    screened = tried([default, *(tuning for tuning in tunings if tuning != default)])
    deadline += 2.0
    backward = case.direction == "backward"
    seen = {tuning for _, tuning, _, _ in screened}
    others = {
        tuning._replace(cluster=cluster, in_turns=in_turns): None
        for _, tuning, _, _ in screened[:4]
        for cluster, in_turns in itertools.product((1, 2, 4, 8) if backward else (1,), (True, False))
    }
    screened += tried([tuning for tuning in others if tuning not in seen])
    best = sorted(screened, key=lambda entry: entry[0])[:8]
    return best + [entry for entry in screened if entry[1] == default and entry not in best]


def time_at(case: Case, n: int, kept: list[Screened], clock: Clock, watchdog: Watchdog) -> list[dict[str, Any]]:
    data, rows = Data(case, n), []
    copy = clock.copy(case.bytes(n), 21)
    for _, tuning, kernels, error in kept:
        watchdog.report(f"timing {case} {tuning} at N = {n}")
        microseconds = clock(lambda kernels=kernels: data.run(cuda_rows, kernels), 21)  # type: ignore[misc]
        rows.append(
            {
                "op": case.operation,
                "direction": case.direction,
                "d": case.channels,
                "n": n,
                "tuning": tuning._asdict(),
                "microseconds": microseconds,
                "copy_microseconds": copy,
                "share_of_copy": copy / microseconds,
                "registers": kernels.kernel.attribute("NUM_REGS"),
                "spilled_bytes": kernels.kernel.attribute("LOCAL_SIZE_BYTES"),
                "error": error,
            }
        )
    return rows


def report(rows: list[dict[str, Any]], cases: list[Case]) -> None:
    """Prints the best launch per N, and the best over all N as lines of `MEASURED`."""
    table = []
    for case in cases:
        mine = [r for r in rows if (r["op"], r["direction"], r["d"]) == (case.operation, case.direction, case.channels)]
        for n in LENGTHS:
            here = sorted((r for r in mine if r["n"] == n), key=lambda r: -r["share_of_copy"])
            if here:
                best = here[0]
                met = "ok " if best["share_of_copy"] >= case.goal(n) else "LOW"
                print(
                    f"{met} {case.operation:28} {case.direction:8} D={case.channels} N={n:5} "
                    f"{100 * best['share_of_copy']:5.1f} % of copy {best['microseconds']:7.1f} us "
                    f"{tuple(best['tuning'].values())} {best['registers']} regs, {best['spilled_bytes']} B local"
                )
        if mine:
            worst: dict[tuple[Any, ...], float] = {}
            for r in mine:
                key = tuple(r["tuning"].values())
                worst[key] = min(worst.get(key, 9.0), r["share_of_copy"] / case.goal(r["n"]))
            chosen = max(worst, key=lambda key: worst[key])
            key = (case.direction, case.op.norm is not None, case.op.residual, case.channels, 2)
            shares = [round(100 * r["share_of_copy"], 1) for r in mine if tuple(r["tuning"].values()) == chosen]
            table.append(f"    {key}: RowTuning{chosen},  # {shares} %")
    print("\n".join(table), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON of everything that was timed")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--operations", nargs="*", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--directions", nargs="*", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--channels", nargs="*", type=int, default=list(CHANNELS))
    parser.add_argument("--smoke", choices=["bulk", "threads"], help="only run one kernel with such copies")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke(arguments.smoke == "bulk")
        return
    deadline = time.monotonic() + arguments.seconds - 15
    cases = [
        Case(operation, direction, d)
        for operation in arguments.operations
        for direction in arguments.directions
        for d in arguments.channels
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report(sweep(cases, arguments.arch, deadline, arguments.output), cases)
    os._exit(0)  # The watchdog and unfinished compilations need not be waited for.


if __name__ == "__main__":
    main()
