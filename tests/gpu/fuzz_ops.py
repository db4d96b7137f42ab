"""Every op of `lightning_videoscale.kernels` on random cases against an oracle in float64 that is written apart.

    python -m tests.gpu.fuzz_ops --seeds 0:20000                                    # on a GPU
    python -m tests.gpu.fuzz_ops --seed 4711                                        # one case again
    python -m tests.gpu.fuzz_ops --device cpu --backend reference --seeds 0:2000 --elements 20000
    TRITON_INTERPRET=1 python -m tests.gpu.fuzz_ops --device cpu --backend triton --seeds 0:100 --elements 1500

Run from the root of the repository. A case depends on its seed and on nothing but the options, so ranges of seeds may
be run apart. Exits with 1 where a case is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from tests.gpu.fuzzing.cases import Options, Verdict, case_of, variants
from tests.gpu.fuzzing.workers import verdicts

_PROGRESS_EVERY = 15.0  # seconds


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    arguments = _arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the memory filled with NaN asks for it
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here: --device cpu runs the reference, or Triton's interpreter.")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    options = Options(arguments.device, arguments.backend, arguments.elements, interpreted)
    if arguments.seed is not None:
        print(case_of(arguments.seed, options))
        seeds, workers = range(arguments.seed, arguments.seed + 1), 0
    else:
        seeds, workers = range(*arguments.seeds), arguments.workers
    print(
        f"{len(seeds)} cases of {len(variants(0, options))} variants, {workers or 1} processes, {options}", flush=True
    )
    started = time.monotonic()
    done = _watched(verdicts(seeds, options, workers), len(seeds), options)
    if arguments.seed is not None:
        print("\n".join(f"  {name}: {error:.3g} of what is allowed" for name, error in done[0].errors))
    print(_summary(done))
    wrong = [verdict.seed for verdict in done if verdict.status == "wrong"]
    print(f"{len(done)} cases in {time.monotonic() - started:.0f} s, {len(wrong)} wrong: {sorted(wrong)[:50]}")
    return 1 if wrong or len(done) != len(seeds) else 0


def _watched(results: Iterable[Verdict], total: int, options: Options) -> list[Verdict]:
    """All verdicts; what is wrong is printed as it comes, and every few seconds how far things are."""
    done: list[Verdict] = []
    wrong, started = 0, time.monotonic()
    told = started
    for verdict in results:
        done.append(verdict)
        if verdict.status == "wrong":
            wrong += 1
            print(f"WRONG seed {verdict.seed}, {verdict.op} on {verdict.backend}: {verdict.message}")
            print(f"      {case_of(verdict.seed, options)}", flush=True)
        if time.monotonic() - told > _PROGRESS_EVERY:
            told = time.monotonic()
            print(f"{told - started:5.0f} s: {len(done)} of {total} cases, {wrong} wrong", flush=True)
    return done


def _summary(done: list[Verdict]) -> str:
    """How many of every op and backend are right, wrong and refused, how close they come, and why they are refused."""
    counts, worst = Counter[tuple[str, str, str]](), defaultdict[tuple[str, str], float](float)
    reasons = Counter[str]()
    for verdict in done:
        key = verdict.op, verdict.backend
        counts[(*key, verdict.status)] += 1
        if verdict.status == "right":
            worst[key] = max(worst[key], *(error for _, error in verdict.errors))
        if verdict.status == "refused":
            # One reason whatever the sizes and dtypes.
            reason = re.sub(r"torch\.\w+|\d+", "…", verdict.message)[:110]
            reasons[f"{verdict.op} on {verdict.backend}: {reason}"] += 1
    lines = [f"{'op':<28}{'backend':<11}{'right':>7}{'refused':>9}{'wrong':>7}  largest error / allowed"]
    for op, backend in sorted({key[:2] for key in counts}):
        right, refused, wrong = (counts[op, backend, status] for status in ("right", "refused", "wrong"))
        lines.append(f"{op:<28}{backend:<11}{right:>7}{refused:>9}{wrong:>7}  {worst[op, backend]:.3f}")
    refusals = [f"  {count:>5} {reason}" for reason, count in sorted(reasons.items())]
    return "\n".join([*lines, "refused:" if refusals else "none refused", *refusals])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_seed_range, default=(0, 20_000), help="first:stop (default: 0:20000)")
    parser.add_argument("--seed", type=int, help="one case alone, whose description is printed")
    parser.add_argument("--backend", choices=["auto", "cuda", "triton", "reference"], help="for every case")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--elements", type=int, default=2_000_000, help="the most of an activation (default: 2000000)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; 0: this one (default: one a core)"
    )
    return parser.parse_args()


def _seed_range(text: str) -> tuple[int, int]:
    first, _, stop = text.partition(":")
    return int(first), int(stop)


if __name__ == "__main__":
    sys.exit(main())
