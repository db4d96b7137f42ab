"""Attention by the kernel that is chosen beside torch's own pick, and a whole Wan step with each, in turns on one GPU.

    python benchmarks/parallel/attention_backends.py

The first part is attention alone, forward and backward: bf16, B = 1, D = 128, tensors in memory as networks project
them. The second is a step of Wan-1.3B with fused kernels, forward and backward, at 32 760 tokens. All is measured and
chosen by one `AttentionChoices` in the beginning, as after the first step of a run, within the seconds that a run has
for it; the file says what it chose, why, and what that took, and the host's time of a call. What earlier runs have left
on disk is not read.

Variants take turns, in another order in every round, and are compared round by round. ``--tiny`` tries the script on
whatever device there is.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.timing import alternate
from lightning_videoscale.attention import KERNELS, AttentionChoices, attention
from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.compat.names import installed_version

HEADS = (3, 5, 12, 24, 40)
LENGTHS = (8_192, 16_384, 32_760, 75_600)
DIM = 128
WAN_1_3B = {"num_attention_heads": 12, "ffn_dim": 8960}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
Row = dict[str, Any]


class Problem:
    """Tensors of one call, (B, H, S, D) with tokens first in memory, and the gradient of its output."""

    def __init__(self, heads: int, length: int) -> None:
        def draw() -> Tensor:
            return torch.randn(1, length, heads, DIM, device=DEVICE, dtype=DTYPE).transpose(1, 2)

        self.inputs = [draw().requires_grad_() for _ in range(3)]
        self.cotangent = draw()

    def by_torch(self) -> list[Tensor]:
        out = F.scaled_dot_product_attention(*self.inputs)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.cotangent)]

    def by(self, choices: AttentionChoices) -> list[Tensor]:
        query, key, value = self.inputs
        out = attention(choices, query, key, value, DIM**-0.5)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.cotangent)]


def ask(choices: AttentionChoices, heads: int, length: int) -> str:
    """What is chosen for a call; asking makes it known to `settle`."""
    sample = torch.empty(1, heads, 1, DIM, device=DEVICE, dtype=DTYPE).expand(-1, -1, length, -1)
    return choices.choose(AttentionCase.of(sample, sample, masked=False, with_lse=False))


def measure_attention(choices: AttentionChoices, heads: int, length: int, options: argparse.Namespace) -> Row:
    """One shape: torch's own pick, what was chosen, and each kernel by name if asked for."""
    problem = Problem(heads, length)
    variants = {"sdpa": problem.by_torch, "auto": partial(problem.by, choices)}
    for name in options.named:
        variants[name] = partial(problem.by, AttentionChoices(name))
    expected = problem.by_torch()
    differences = {
        name: max(relative(got, other) for got, other in zip(run(), expected, strict=True))
        for name, run in variants.items()
    }
    del expected
    times = alternate(variants, device=DEVICE, warm_up=1, repeats=options.repeats, rounds=options.rounds)
    return {
        "heads": heads,
        "tokens": length,
        "chosen": ask(choices, heads, length),
        "sdpa_over_auto": times["sdpa"].spread_over(times["auto"]),
        **{f"{name}_ms": round(mine.median, 3) for name, mine in times.items()},
        "difference_from_sdpa": {name: float(f"{error:.2e}") for name, error in differences.items()},
    }


def host_times(choices: AttentionChoices, calls: int = 200) -> Row:
    """Microseconds of the host for a call, forward and backward, so short that the device does not hold it up.

    ``auto`` is torch's own pick at this length, so what it takes longer than ``sdpa`` is the price of asking.
    """
    problem = Problem(1, 64)
    variants = {"sdpa": problem.by_torch, "auto": partial(problem.by, choices)}
    for name, kernel in KERNELS.items():
        if kernel.objection(AttentionCase.of(*problem.inputs[:2], masked=False, with_lse=False)) is None:
            variants[name] = partial(problem.by, AttentionChoices(name))
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(5):
        for name, run in variants.items():
            run()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            rounds[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {"tokens": 64, "host_us": {name: round(statistics.median(mine), 1) for name, mine in rounds.items()}}


def measure_step(choices: AttentionChoices, options: argparse.Namespace) -> Row:
    """A step of Wan with fused kernels, with torch's own pick and with what is chosen."""
    from benchmarks.kernels import wan_step
    from lightning_videoscale.injection import inject_fused_kernels
    from lightning_videoscale.parallel import find_plan
    from lightning_videoscale.parallel.chosen_attention import choose_attention

    config = wan_step.TINY if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    size = wan_step.Latents(2, 4, 6) if options.tiny else wan_step.Latents()
    model, inputs = wan_step.wan(config), wan_step.draw(size)
    inject_fused_kernels(model)
    asking = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    plan = find_plan(asking)
    assert plan is not None
    choose_attention(asking, plan, choices)

    def step(network: torch.nn.Module) -> None:
        network(*inputs, return_dict=False)[0].float().square().mean().backward()
        network.zero_grad(set_to_none=True)

    step(asking)
    choices.settle()
    variants = {"sdpa": partial(step, model), "auto": partial(step, asking)}
    times = alternate(variants, device=DEVICE, warm_up=2, repeats=options.repeats, rounds=options.rounds)
    return {
        "model": "tiny" if options.tiny else "Wan-1.3B, fused",
        "layers": config["num_layers"],
        "tokens": size.tokens,
        "chosen": ask(choices, config["num_attention_heads"], size.tokens),
        "auto_over_sdpa": times["auto"].spread_over(times["sdpa"]),
        **{f"{name}_ms": round(mine.median, 2) for name, mine in times.items()},
    }


def relative(x: Tensor, other: Tensor) -> float:
    return float((x.float() - other.float()).norm() / other.float().norm())


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--named", nargs="*", default=[], choices=list(KERNELS), help="kernels to time beside")
    parser.add_argument("--layers", type=int, default=30, help="of Wan-1.3B; 0: no step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs in a turn, after one that is not")
    parser.add_argument("--tiny", action="store_true", help="try the script with small shapes")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("parallel", "attention_backends")
    if options.tiny:
        options.heads, options.lengths, options.layers = (3,), (1_100,), 2
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        choices = AttentionChoices(folder=Path(folder), candidates=["math"] if DEVICE.type == "cpu" else None, log=log)
        choices.prepare(DEVICE)
        for heads in options.heads:
            for length in options.lengths:
                ask(choices, heads, length)
        begin = time.perf_counter()
        choices.settle()
        seconds = round(time.perf_counter() - begin, 2)
        print(f"measuring and choosing took {seconds} s", flush=True)
        settings = {
            "dtype": "bfloat16",
            "batch_size": 1,
            "head_dim": DIM,
            "rounds": options.rounds,
            "repeats": options.repeats,
            "tiny": options.tiny,
            "packages": {
                name: installed_version(name) for name in ("flash-attn-4", "flash-attn", "nvidia-cutlass-dsl")
            },
            "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
            "seconds_of_choosing": seconds,
            "log": lines,
        }
        for heads in options.heads:
            for length in options.lengths:
                rows.append(measure_attention(choices, heads, length, options))
                print(rows[-1], flush=True)
                provenance.write(output, "parallel/attention_backends", commit, settings, rows)
        rows.append(host_times(choices))
        print(rows[-1], flush=True)
        if options.layers:
            rows.append(measure_step(choices, options))
            print(rows[-1], flush=True)
            provenance.write(output, "parallel/attention_backends", commit, settings, rows)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
