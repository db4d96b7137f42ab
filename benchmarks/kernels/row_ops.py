"""The fused ops of a Wan block beside eager PyTorch, `torch.compile`, Liger-Kernel and a device copy.

    python benchmarks/kernels/row_ops.py

Forward and backward apart, bfloat16 tokens and float32 modulation, the L2 cache flushed before every run. 100 % of copy
is the time in which the device copies as many bytes as the op must read and write, measured in the same rounds. Beside
the time, what the forward keeps for backward beyond its inputs and outputs, and the peak of forward and backward.
Liger-Kernel and a GPU are needed; without Liger-Kernel its rows are left out. The file is written anew after every op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config  # torch alone does not load it
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.kernels.implementations import OPS, Function, implementations

SHAPES = [(n, d) for d, ns in ((5120, (8, 16, 32, 64)), (3072, (8, 16, 64)), (1536, (16, 64))) for n in ns]
FLUSH = 1 << 32  # bytes written before every run: far more than the L2, and 1 ms for the host to queue what follows
Row = dict[str, Any]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--backends", nargs="+", default=["cuda", "triton"])
    parser.add_argument("--compiled", nargs="*", type=int, default=[5120], help="widths at which to compile eager too")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    torch._functorch.config.donated_buffer = False  # backward runs more than once
    settings = {"dtype": "bfloat16", "modulation": "float32, one per sample", "flush_bytes": FLUSH} | {
        "repeats": options.repeats,
        "rounds": options.rounds,
    }
    output = options.output or provenance.path("kernels", "row_ops")
    rows: list[Row] = []
    for op in options.ops:
        for thousands, d in SHAPES:
            torch._dynamo.reset()
            candidates = implementations(op, options.backends, d in options.compiled)
            mine = measure(op, thousands * 1024, d, candidates, options.repeats, options.rounds)
            rows += mine
            show(mine)
        provenance.write(output, "kernels/row_ops", commit, settings, rows)
    print(f"written to {output}")


def measure(op: str, n: int, d: int, candidates: Mapping[str, Function], repeats: int, rounds: int) -> list[Row]:
    """Times one op at one shape, all implementations taking turns; one row each for forward and backward."""
    torch.manual_seed(0)
    inputs = OPS[op].inputs(n, d)
    leaves = [x for x in inputs if x.requires_grad]
    rows: list[Row] = []
    needed = {"forward": OPS[op].forward_bytes(n, d), "backward": OPS[op].backward_bytes(n, d)}
    runs = {direction: {"copy": _copy(nbytes)} for direction, nbytes in needed.items()}
    memory: dict[str, Row] = {}
    for name, function in candidates.items():
        try:
            memory[name], backward = prepare(function, inputs, leaves)
        except Exception as error:  # compiled code that fails is a result
            rows.append(_row(op, n, d, "backward", name) | {"failed": f"{type(error).__name__}: {error}"[:300]})
            continue
        runs["forward"][name] = lambda function=function: function(*inputs)
        runs["backward"][name] = backward
    for direction, here in runs.items():
        times = alternate(here, repeats, rounds)
        copied = np.median(times["copy"])
        for name, mine in times.items():
            low, median, high = np.percentile(mine, (10, 50, 90))
            figures = {"median_us": median, "p10_us": low, "p90_us": high, "percent_of_copy": 100 * copied / median}
            row = _row(op, n, d, direction, name) | {key: round(float(value), 2) for key, value in figures.items()}
            rows.append(row | memory.get(name, {}))
    return rows


def prepare(function: Function, inputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Row, Callable[[], object]]:
    """Returns what forward and backward take beyond inputs and outputs, and a backward that can run again."""
    torch.autograd.grad(_list(function(*inputs)), leaves, [torch.randn_like(y) for y in _list(function(*inputs))])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = _list(function(*inputs))
    kept = torch.cuda.memory_allocated() - before - sum(y.nbytes for y in outputs)
    gradients = [torch.randn_like(y) for y in outputs]
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    rows = inputs[0].shape[0] * inputs[0].shape[1]
    figures = {"kept_bytes": kept, "kept_bytes_per_token": round(kept / rows, 2), "peak_bytes": peak}
    return figures, lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


def _list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _copy(nbytes: int) -> Callable[[], object]:
    source = torch.randint(255, (nbytes // 2,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def alternate(runs: Mapping[str, Callable[[], object]], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of every run, in rounds in which all take turns, each from a flushed cache."""
    flush = torch.empty(FLUSH, device="cuda", dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
            for begin, end in events:
                flush.fill_(1)
                begin.record()
                run()
                end.record()
            torch.cuda.synchronize()
            times[name] += [1e3 * begin.elapsed_time(end) for begin, end in events]
    return times


def _row(op: str, n: int, d: int, direction: str, implementation: str) -> Row:
    return {"op": op, "direction": direction, "n": n, "d": d, "implementation": implementation}


def show(rows: list[Row]) -> None:
    for row in rows:
        head = f"{row['op']:28s} {row['direction']:8s} n {row['n']:>6} d {row['d']:>5} {row['implementation']:24s}"
        if "failed" in row:
            print(f"{head} {row['failed'][:80]}", flush=True)
            continue
        kept = f", keeps {row['kept_bytes_per_token']} B/token" if "kept_bytes_per_token" in row else ""
        print(f"{head} {row['median_us']:>8.1f} us, {row['percent_of_copy']:5.1f} % of copy{kept}", flush=True)


if __name__ == "__main__":
    main()
