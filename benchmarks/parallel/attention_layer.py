"""An attention layer, forward and backward, over a sequence split over all GPUs: ours, yunchang's and diffusers'.

    torchrun --nproc-per-node 4 benchmarks/parallel/attention_layer.py

A layer is the projections to query, key and value, attention, and the output projection, in bf16, B = 1. All of it but
the attention over the split sequence is the same code, and the attention kernel is cuDNN's on all sides. Variants take
turns, so that clocks and heat touch all alike; ratios are taken round by round. Results and gradients are compared with
ours. See `baselines` for how the others are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import join_ranks
from benchmarks.parallel import baselines
from benchmarks.parallel.baselines import Attention
from benchmarks.timing import Times, alternate
from lightning_videoscale.compat.names import installed_version
from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, Transport, sequence_parallel_attention
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport

MODELS = {"wan-14b": (40, 128), "wan-1.3b": (12, 128)}  # heads, head dim
LENGTHS = (4096, 8192, 16384)  # per rank
WARM_UP, REPEATS, ROUNDS = 2, 4, 5


@dataclass(frozen=True)
class Variant:
    """One way to attend, or why it cannot be had here."""

    name: str
    ring: int
    ulysses: int
    attention: Attention | None
    problem: str | None = None

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")


class Layer:
    """Weights and inputs of one shape; the same weights on all ranks."""

    def __init__(self, heads: int, dim: int, length: int, device: torch.device) -> None:
        self.heads, width = heads, heads * dim
        shared, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))

        def random(*shape: int, generator: torch.Generator) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        self.weights = [(random(width, width, generator=shared) * width**-0.5).requires_grad_() for _ in range(4)]
        self.x = random(1, length, width, generator=own).requires_grad_()
        self.cotangent = random(1, length, width, generator=own)

    def step(self, attention: Attention) -> list[Tensor]:
        """The output, and the gradients of the input and of the weights."""
        *projections, output = self.weights
        query, key, value = (F.linear(self.x, weight).unflatten(-1, (self.heads, -1)) for weight in projections)
        out = F.linear(attention(query, key, value).flatten(2), output)
        return [out.detach(), *torch.autograd.grad(out, [self.x, *self.weights], self.cotangent)]


def variants(device: torch.device) -> list[Variant]:
    """Ours first; every mesh over all ranks, and each of the others on the same mesh."""
    world, found = dist.get_world_size(), []
    shapes = [(1, world), (2, world // 2), (world, 1)] if world > 2 else [(1, world), (world, 1)]
    backends = {"cuda": ("_native_cudnn", "native"), "cpu": ("native",)}[device.type]
    for ring, ulysses in shapes:
        mesh = SequenceMesh.create(device.type, ulysses_size=ulysses, ring_size=ring)
        found.append(Variant("ours, collective", ring, ulysses, ours(mesh, CollectiveTransport())))
        if ulysses > 1 and device.type == "cuda":
            made = made_or_why(
                lambda mesh=mesh: ours(mesh, SymmetricTransport.create(mesh, device, timedelta(minutes=1)))
            )
            found.append(Variant("ours, symmetric", ring, ulysses, *made))
        made = made_or_why(lambda ring=ring, ulysses=ulysses: baselines.yunchang(ring, ulysses))
        found.append(Variant("yunchang", ring, ulysses, *made))
        for backend in backends if ring == 1 else backends[:1]:  # its native backend has no ring
            made = made_or_why(
                lambda ring=ring, ulysses=ulysses, backend=backend: baselines.diffusers(
                    ring, ulysses, backend, device.type
                )
            )
            found.append(Variant(f"diffusers, {backend}", ring, ulysses, *made))
    return found


def ours(mesh: SequenceMesh, transport: Transport) -> Attention:
    return lambda query, key, value: sequence_parallel_attention(query, key, value, mesh, transport=transport)


def made_or_why(make: Callable[[], Attention]) -> tuple[Attention | None, str | None]:
    try:
        return make(), None
    except Exception as error:  # of libraries that may be missing, or of another version
        return None, f"{type(error).__name__}: {error}"


def one_kernel(device: torch.device) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext()


def measure(
    model: str, heads: int, dim: int, length: int, candidates: list[Variant], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """One row for each variant."""
    layer = Layer(heads, dim, length, device)
    rows, running, reference = [], {}, None
    for variant in candidates:
        shape = {"model": model, "heads": heads, "head_dim": dim, "tokens_per_rank": length}
        row = {**shape, "ring_size": variant.ring, "ulysses_size": variant.ulysses, "variant": variant.name}
        rows.append(row)
        problem, results = variant.problem, None
        if variant.attention is not None:
            try:
                results = layer.step(variant.attention)
            except Exception as error:  # whatever others' code raises is a finding; ours must run
                if variant.ours:
                    raise
                problem = f"{type(error).__name__}: {error}"
        if results is None:
            row["problem"] = problem
            continue
        reference = results if reference is None else reference
        errors = [
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, reference, strict=True)
        ]
        row["difference_from_first"] = float(f"{largest(max(errors), device):.2e}")
        running[len(rows) - 1] = variant.attention
    times = alternate(
        {str(index): lambda attention=attention: layer.step(attention) for index, attention in running.items()},
        device=device,
        warm_up=WARM_UP,
        repeats=REPEATS,
        rounds=rounds,
    )
    for index in running:
        mine = times[str(index)]
        rows[index] |= {"median_ms": round(mine.median, 3), "round_medians_ms": [round(ms, 3) for ms in mine.rounds]}
    add_ratios(rows, times)
    return rows


def add_ratios(rows: list[dict[str, Any]], times: dict[str, Times]) -> None:
    """Adds to each of ours its time over that of each of the others on the same mesh."""
    for index, row in enumerate(rows):
        if not row["variant"].startswith("ours") or str(index) not in times:
            continue
        for other, theirs in enumerate(rows):
            same = all(theirs[name] == row[name] for name in ("ring_size", "ulysses_size"))
            if same and not theirs["variant"].startswith("ours") and str(other) in times:
                row.setdefault("over", {})[theirs["variant"]] = round(times[str(index)].over(times[str(other)]), 4)


def largest(value: float, device: torch.device) -> float:
    x = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs with gloo at other, tiny shapes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    device = join_ranks(not arguments.tiny)
    first = dist.get_rank() == 0
    commit = (arguments.commit or provenance.commit()) if first else ""
    models, lengths = ({"tiny": (8, 16)}, (32,)) if arguments.tiny else (MODELS, LENGTHS)
    candidates, rows = variants(device), []
    if first:
        print(
            f"{'model':>9} {'tokens':>7} {'ring x ulysses':>14} {'variant':>24} {'ms':>9} {'difference':>10}  ours over"
        )
    for model, (heads, dim) in models.items():
        for length in lengths:
            with one_kernel(device):
                mine = measure(model, heads, dim, length, candidates, device, arguments.rounds)
            rows += mine
            if first:
                show(mine)
    if first:
        settings = {
            "dry_run": arguments.tiny,
            "ranks": dist.get_world_size(),
            "batch_size": 1,
            "dtype": "bfloat16",
            "attention_kernel": "cuDNN" if device.type == "cuda" else "flash on CPUs",
            "warmup": WARM_UP,
            "repeats": REPEATS,
            "rounds": arguments.rounds,
            "yunchang": installed_version("yunchang"),
            "diffusers": installed_version("diffusers"),
        }
        output = arguments.output or provenance.path("parallel", "attention_layer")
        provenance.write(output, "parallel/attention_layer", commit, settings, rows)
        print(f"written to {output}")
    dist.barrier()
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        mesh = f"{row['ring_size']} x {row['ulysses_size']}"
        time = (
            f"{row['median_ms']:>9.2f} {row['difference_from_first']:>10.1e}" if "median_ms" in row else row["problem"]
        )
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row.get("over", {}).items())
        print(
            f"{row['model']:>9} {row['tokens_per_rank']:>7} {mesh:>14} {row['variant']:>24} {time}  {ratios}",
            flush=True,
        )


if __name__ == "__main__":
    main()
