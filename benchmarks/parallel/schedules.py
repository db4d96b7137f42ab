"""What splitting a sequence costs an attention layer, by schedule and transport: beside its compute alone.

    torchrun --nproc-per-node 2 benchmarks/parallel/schedules.py

Parts, in bf16, forward and backward:

- `projections`: query, key and value of 40 heads of 128 channels, with their exchange. Alone: the faster of three
  products and a packed one, with nothing exchanged.
- `layer`: those, attention, and the output projection. Alone: the same products and the same attention kernel on as
  many tokens and heads as a rank has after the exchange.

"overlap" is, in forward, the schedule that others have (VeOmni's async Ulysses): each projection's exchange runs beside
the next projection. Its backward is that of "sliced" but for the output's product. Variants take turns; ratios are
taken round by round, and "alone, again" shows their spread.

With ``--graphs``, all of them run as CUDA graphs, so that the host launches nothing: as steps of a training do under
``graphs=``, and as the device alone would need.

"auto" is the layer under the schedule that the package chooses for it, by a trial of its own. Forward and backward
together, it may take 2 % longer than the best schedule, and the spread. Else the command fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import join_ranks
from benchmarks.timing import Times, alternate
from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.dispatch import attention
from lightning_videoscale.graphs import Recorder
from lightning_videoscale.kernels import qkv_linear
from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, Transport
from lightning_videoscale.parallel.schedules import PENDING, ScheduleName
from lightning_videoscale.parallel.schedules.attention_output import attend_and_project, project_output
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.parallel.schedules.input_projections import project_heads
from lightning_videoscale.parallel.schedules.table import LayerShape
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads, gather_heads, scatter_heads

HEADS, HEAD_DIM = 40, 128
CELLS = [(1, 4096), (1, 8192), (1, 16384), (1, 32768), (8, 2048)]  # batch size, tokens of a rank
TINY = [(1, 32), (2, 16)]
WARM_UP, FEWEST_REPEATS, ROUNDS = 2, 3, 10
WORSE = 0.02  # by which "auto" may be slower than the best schedule

Run = Callable[[], Sequence[Tensor]]


class Layer:
    """Weights and inputs of one cell, the weights alike on all ranks."""

    def __init__(
        self, batch: int, tokens: int, heads: int, mesh: SequenceMesh, device: torch.device, kernel: Any
    ) -> None:
        shared, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))
        width, size = heads * HEAD_DIM, mesh.ulysses.size
        self.heads, self.mesh, self.choices, self.tokens = heads, mesh, AttentionChoices(kernel), tokens

        def random(*shape: int, generator: torch.Generator = own) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        self.weights = [(random(width, width, generator=shared) * width**-0.5).requires_grad_() for _ in range(4)]
        self.packed = torch.cat([w.detach() for w in self.weights[:3]])
        self.x = random(batch, tokens, width).requires_grad_()
        self.dy = random(batch, tokens, width)
        shape = (batch, tokens * size, heads // size, HEAD_DIM)
        self.qkv = [random(*shape).transpose(1, 2).requires_grad_() for _ in range(3)]
        self.d_heads = [random(*shape).transpose(1, 2) for _ in range(3)]

    @property
    def shape(self) -> LayerShape:
        """As layers tell it to what chooses their schedule."""
        tokens, width = self.tokens * self.mesh.ulysses.size, self.heads * HEAD_DIM
        sizes = self.x.shape[0], tokens, width, self.heads, self.heads, HEAD_DIM
        return LayerShape(*sizes, across_heads=False, dtype="bfloat16", has_biases=False)

    def ulysses(self, transport: Transport) -> Ulysses:
        lengths = (self.tokens,) * self.mesh.ulysses.size
        heads = assign_heads(self.mesh.ulysses.rank, lengths, lengths, self.heads, self.heads)
        return Ulysses(self.mesh.ulysses, heads, transport)

    # -- query, key and value ----------------------------------------------------------------------------------------

    def alone(self, packed: bool) -> Run:
        if packed:
            return lambda: [self.x.detach().flatten(0, 1) @ self.packed.t()]
        return lambda: [F.linear(self.x.detach(), weight.detach()) for weight in self.weights[:3]]

    def alone_backward(self, packed: bool) -> Run:
        rows, x = self.dy.flatten(0, 1), self.x.detach().flatten(0, 1)
        if packed:
            three = rows.repeat(1, 3)
            return lambda: [three @ self.packed, three.t() @ x]
        weights = [weight.detach() for weight in self.weights[:3]]

        def run() -> Sequence[Tensor]:
            dx = rows @ weights[0]
            for weight in weights[1:]:
                dx.addmm_(rows, weight)
            return [dx, *(rows.t() @ x for _ in weights)]

        return run

    def serial(self, ulysses: Ulysses) -> Run:
        def run() -> Sequence[Tensor]:
            projected = qkv_linear(self.x, (self.weights[0], self.weights[1], self.weights[2]))
            q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in projected)
            return scatter_heads(q, k, v, ulysses)

        return run

    def hiding(self, ulysses: Ulysses, *, by_slices: bool) -> Run:
        linears = [(weight, None) for weight in self.weights[:3]]

        def run() -> Sequence[Tensor]:
            heads = project_heads(self.x, linears, None, ulysses, self.heads, by_slices=by_slices)
            return [heads.query, heads.key, heads.value]

        return run

    # -- the layer ---------------------------------------------------------------------------------------------------

    def layer_alone(self) -> Run:
        def run() -> Sequence[Tensor]:
            heads = [each.detach().requires_grad_() for each in self.qkv]
            qkv_linear(self.x, (self.weights[0], self.weights[1], self.weights[2]))
            out = attention(self.choices, *heads, HEAD_DIM**-0.5)
            return [out, F.linear(self.dy, self.weights[3])]

        return run

    def layer_alone_backward(self) -> Run:
        out = attention(self.choices, *self.qkv, HEAD_DIM**-0.5)
        projections = self.alone_backward(packed=False)
        rows, weight = self.dy.flatten(0, 1), self.weights[3].detach()
        return lambda: [
            rows @ weight,
            rows.t() @ rows,
            *torch.autograd.grad(out, self.qkv, self.d_heads[0], retain_graph=True),
            *projections(),
        ]

    def layer_serial(self, ulysses: Ulysses) -> Run:
        projected = self.serial(ulysses)

        def run() -> Sequence[Tensor]:
            q, k, v = projected()
            out = gather_heads(attention(self.choices, q, k, v, HEAD_DIM**-0.5), ulysses)
            return [F.linear(out.flatten(2), self.weights[3])]

        return run

    def layer_hiding(self, ulysses: Ulysses, *, by_slices: bool) -> Run:
        projected = self.hiding(ulysses, by_slices=by_slices)

        def run() -> Sequence[Tensor]:
            q, k, v = projected()
            if not by_slices:
                out = attention(self.choices, q, k, v, HEAD_DIM**-0.5)
                return [project_output(out, (self.weights[3], None), ulysses, by_slices=False)]
            return [attend_and_project(q, k, v, (self.weights[3], None), ulysses, self.choices, HEAD_DIM**-0.5)]

        return run

    def backward(self, forward: Run) -> Run:
        """The backward of a forward that ran once."""
        outputs = forward()
        cotangents = self.d_heads if len(outputs) == 3 else [self.dy]
        wanted = [self.x, *self.weights[: 3 if len(outputs) == 3 else 4]]
        return lambda: torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)


def captured(run: Run, pool: Any) -> Run:
    """The same as a CUDA graph, which reads what ``run`` holds."""
    run()  # what it needs for the first time, it does not meet in the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="relaxed"):
        run()

    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _holder: Run) -> Sequence[Tensor]:
    graph.replay()
    return ()


def choose(layer: Layer, transports: dict[str, Transport], *, by_graphs: bool) -> dict[str, ScheduleName]:
    """What "auto" runs, by transport, measured anew."""
    recorder = Recorder if by_graphs else None
    found = {}
    for name, transport in transports.items():
        with tempfile.TemporaryDirectory() as folder:
            schedules = ScheduleChoices(folder=Path(folder), recorder=recorder, log=partial(print, flush=True))
            schedules.prepare(layer.mesh, transport, layer.choices)
            schedules.choose(layer.shape, schedules.table)
            schedules.settle()
            found[name] = schedules.choose(layer.shape, schedules.table)
    return found


def variants(
    layer: Layer, part: str, direction: str, transports: dict[str, Transport], chosen: dict[str, ScheduleName]
) -> dict[str, Run]:
    """By name; those that begin with "alone" exchange nothing."""
    found: dict[str, Run] = {}
    for again in ("", ", again"):
        if part == "layer":
            found[f"alone{again}"] = layer.layer_alone() if direction == "forward" else layer.layer_alone_backward()
        else:
            alone = layer.alone if direction == "forward" else layer.alone_backward
            found |= {f"alone, three{again}": alone(False), f"alone, packed{again}": alone(True)}
    for name, transport in transports.items():
        ulysses = layer.ulysses(transport)
        hiding = layer.layer_hiding if part == "layer" else layer.hiding
        by_schedule = {
            "serial": (layer.layer_serial if part == "layer" else layer.serial)(ulysses),
            "overlap": hiding(ulysses, by_slices=False),
            "sliced": hiding(ulysses, by_slices=True),
        }
        if part == "layer":
            by_schedule["auto"] = by_schedule[chosen[name]]
        if direction == "backward":
            by_schedule = {schedule: layer.backward(forward) for schedule, forward in by_schedule.items()}
        found |= {f"{schedule}, {name}": run for schedule, run in by_schedule.items()}
    return found


def rows_of(taken: dict[str, Times], cell: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each variant: milliseconds, and the ratio to the faster way to compute alone."""
    once = [name for name in taken if name.startswith("alone") and not name.endswith("again")]
    base = min(once, key=lambda name: taken[name].median)
    rows = []
    for name, mine in taken.items():
        schedule, _, transport = name.partition(", ")
        rows.append(
            cell
            | {"schedule": schedule, "transport": transport}
            | {"median_ms": round(mine.median, 4), "over_alone": round(mine.over(taken[base]), 4)}
            | {"round_medians_ms": [round(ms, 4) for ms in mine.rounds]}
        )
    return rows


def judge(
    rows: list[dict[str, Any]], chosen: dict[str, ScheduleName], transports: dict[str, Transport]
) -> list[dict[str, Any]]:
    """One row for each transport: forward and backward of the layer by "auto", over the best schedule.

    With them, what the transport takes of the device beside torch's allocator after all schedules.
    """
    total: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["part"] == "layer":
            place = row["schedule"], row["transport"]
            total[place] = total.get(place, 0.0) + row["median_ms"]
    spread = abs(total["alone", "again"] / total["alone", ""] - 1)
    cell = {name: rows[0][name] for name in ("gpus", "batch_size", "s_local", "heads")}
    judged = []
    for transport, schedule in chosen.items():
        best = min(total[name, transport] for name in get_args(ScheduleName))
        over = total["auto", transport] / best
        found = {"part": "layer", "direction": "both", "schedule": "auto", "transport": transport, "chosen": schedule}
        found |= {"over_best": round(over, 4), "spread": round(spread, 4), "holds": over <= 1 + WORSE + spread}
        found["transport_bytes"] = transports[transport].memory_bytes
        judged.append(cell | found)
    return judged


def check(layer: Layer, transports: dict[str, Transport]) -> float:
    """The largest difference from the first serial layer, relative to the tensor's norm."""
    ways = [layer.layer_serial, *(partial(layer.layer_hiding, by_slices=each) for each in (False, True))]
    runs = [run(layer.ulysses(t)) for t in transports.values() for run in ways]
    results = [[*run(), *layer.backward(run)()] for run in runs]
    pairs = [(a, b) for each in results[1:] for a, b in zip(each, results[0], strict=True)]
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def repeats_of(runs: dict[str, Run], seconds: float, rounds: int, device: torch.device) -> int:
    """How often a variant runs in a round; the same on all ranks."""
    first = dict(list(runs.items())[:1])
    taken = alternate(first, device=device, warm_up=WARM_UP, repeats=FEWEST_REPEATS, rounds=1)
    return max(FEWEST_REPEATS, math.ceil(1e3 * seconds / rounds / next(iter(taken.values())).median))


def measure(
    layer: Layer, transports: dict[str, Transport], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """All rows of a cell; they are shown as they come."""
    difference, chosen = check(layer, transports), choose(layer, transports, by_graphs=options.graphs)
    base = {"gpus": dist.get_world_size(), "batch_size": layer.x.shape[0], "s_local": layer.tokens}
    rows: list[dict[str, Any]] = []
    for part in ("projections", "layer"):
        for direction in ("forward", "backward"):
            cell = base | {"heads": layer.heads, "part": part, "direction": direction}
            runs = variants(layer, part, direction, transports, chosen)
            if options.graphs:
                pool = torch.cuda.graph_pool_handle()
                runs = {name: captured(run, pool) for name, run in runs.items()}
            repeats = repeats_of(runs, options.seconds, options.rounds, device)
            taken = alternate(runs, device=device, warm_up=WARM_UP, repeats=repeats, rounds=options.rounds)
            mine = rows_of(taken, cell | {"difference": float(f"{difference:.2e}")})
            rows += mine
            if dist.get_rank() == 0:
                show(mine)
    return rows + judge(rows, chosen, transports)


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs with gloo at other, tiny shapes")
    parser.add_argument("--cells", type=int, nargs="*", help="which of the cells, by number; all if left out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each variant is timed for, at least")
    parser.add_argument("--graphs", action="store_true", help="run everything as CUDA graphs, on GPUs")
    arguments = parser.parse_args()
    device = join_ranks(not arguments.tiny)
    first = dist.get_rank() == 0
    commit = (arguments.commit or provenance.commit()) if first else ""
    mesh = SequenceMesh.create(device.type, ulysses_size=dist.get_world_size())
    transports: dict[str, Transport] = {"collective": CollectiveTransport()}
    if device.type == "cuda":
        transports["symmetric"] = SymmetricTransport.create(mesh, device, timedelta(minutes=1), PENDING["sliced"])
    kernel, heads = ("cudnn", HEADS) if device.type == "cuda" else ("sdpa", 8)
    cells, rows = TINY if arguments.tiny else CELLS, []
    settings = {"dry_run": arguments.tiny, "dtype": "bfloat16", "attention_kernel": kernel, "warmup": WARM_UP}
    settings |= {name: getattr(arguments, name) for name in ("seconds", "rounds", "graphs")} | {"head_dim": HEAD_DIM}
    output = arguments.output or provenance.path("parallel", f"schedules{'_by_graphs' * arguments.graphs}")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one cannot be captured
    for number in arguments.cells if arguments.cells is not None else range(len(cells)):
        batch, tokens = cells[number]
        layer = Layer(batch, tokens, heads, mesh, device, kernel)
        rows += measure(layer, transports, arguments, device)
        if first:
            provenance.write(output, "parallel/schedules", commit, settings, rows)
    slower = [row for row in rows if not row.get("holds", True)]
    if first:
        print(f"written to {output}")
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()
    if first and slower and not arguments.tiny:
        sys.exit(f"auto is slower than the best schedule by more than {WORSE:.0%} and the spread: {slower}")


def show(rows: list[dict[str, Any]]) -> None:
    head = rows[0]
    cell = f"{head['part']}, {head['direction']}, B {head['batch_size']}, {head['s_local']} tokens a rank"
    print(f"{cell}, difference {head['difference']}", flush=True)
    for row in rows:
        name = ", ".join(filter(None, (row["schedule"], row["transport"])))
        print(f"  {name:>24} {row['median_ms']:>9.3f} ms {row['over_alone']:.3f}", flush=True)


if __name__ == "__main__":
    main()
