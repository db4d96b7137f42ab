"""What splitting one sample costs a few blocks of each fused family: beside their compute alone.

    torchrun --nproc-per-node 2 benchmarks/parallel/family_split.py

The models, lengths and attention kernels of `kernels/family_step.py`, in bfloat16 with fused kernels, forward and
backward. All ranks share one sample by Ulysses. Gradients of parameters are not averaged.

Transport "none" exchanges nothing: a rank goes on with what it would have sent. All else is the same work, with the
rank's share of heads and attention over all tokens. Under "serial" this is the compute alone that all rows are compared
with, round by round. "none, again" is the same once more: how far it is from the first is the spread of a row.

"sliced" with "none" says what the slices cost, without the exchange.

``--tiny`` tries the script with small models on whatever device there is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.kernels.family_step import FAMILIES, Family, Inputs, latent, named, network, step
from benchmarks.kernels.wan_step import DEVICE, free_cache, variant
from benchmarks.launch import join_ranks
from benchmarks.timing import Times, alternate
from lightning_videoscale.parallel import Axis, CollectiveTransport, SequenceMesh, Transport, parallelize
from lightning_videoscale.parallel.schedules import PENDING, ScheduleName
from lightning_videoscale.parallel.transport import Join, create_transport

SCHEDULES: tuple[ScheduleName, ...] = ("serial", "sliced")
ALONE = "serial, none"
COMPARED = 20  # first calls of a split network, which compare what ranks are given, and wait for it
WARM_UP = 1
Row = dict[str, Any]


class Kept(NamedTuple):
    """A message that stays where it is, in pieces, and how many elements of each rank are to come in its place."""

    message: Tensor
    pieces: Sequence[Tensor]
    receive: Sequence[int]

    def send(self, *peers: int) -> None:
        """Sends nothing."""


class Silent(CollectiveTransport):
    """Exchanges nothing once it is silent, and before that by collectives, as first calls compare what comes.

    In silence a rank receives the elements that it sends, from the beginning again if they are too few.
    """

    name = "none"
    silent = False

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        return self.wait(self.all_to_all(message, send, receive, axis))

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        exchange = self.open(message, send, receive, axis)
        exchange.send(*range(axis.size))
        return exchange

    def wait(self, pending: Any, join: Join | None = None) -> Tensor:
        if not isinstance(pending, Kept):
            return super().wait(pending, join)
        received = of_length(pending.message, sum(pending.receive))
        return received if join is None else join(received.split(list(pending.receive)))

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        if not self.silent:
            return super().open(message, send, receive, axis)
        return Kept(message, message.split(list(send)), receive)

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        return of_length(x, sum(lengths)) if self.silent else super().all_gather(x, lengths, axis)


def of_length(x: Tensor, rows: int) -> Tensor:
    """So many rows, of those that there are; nothing is copied where they suffice."""
    return x[:rows] if len(x) >= rows else x.repeat(-(-rows // len(x)), *(1 for _ in x.shape[1:]))[:rows]


def split(
    model: nn.Module, short: Inputs, mesh: SequenceMesh, transport: Transport, schedule: ScheduleName
) -> nn.Module:
    """A fused copy of the model that is split, and whose first calls lie behind it."""
    made = variant(model, "fused", "auto")
    parallelize(made, mesh, transport=transport, attention_backend="sdpa", schedule=schedule)
    for _ in range(COMPARED):
        made(**short, return_dict=False)
    if isinstance(transport, Silent):
        transport.silent = True
    return made


def measure(
    name: str, mesh: SequenceMesh, transports: Mapping[str, Transport], options: argparse.Namespace
) -> list[Row]:
    """One row per schedule and transport."""
    family, model, size = FAMILIES[name], network(name, options.tiny), latent(name, options.tiny)
    inputs, short = (family.inputs(model, each) for each in (size, latent(name, tiny=True)))
    steps = {
        f"{schedule}, {way}": partial(step, split(model, short, mesh, transport, schedule), inputs, family.attention)
        for schedule in SCHEDULES
        for way, transport in {Silent.name: Silent(), **transports}.items()
    }
    steps[f"{ALONE}, again"] = steps[ALONE]
    taken = alternate(steps, device=DEVICE, warm_up=WARM_UP, repeats=options.repeats, rounds=options.rounds)
    cell = {"model": name, "gpus": dist.get_world_size(), "latent": list(size), "tokens": tokens(model, size)}
    return rows_of(taken, cell, family)


def tokens(model: Any, size: tuple[int, int, int]) -> int:
    """Of a latent; text is not counted."""
    patch = model.config.patch_size
    return math.prod(size) // (patch**2 if isinstance(patch, int) else math.prod(patch))


def rows_of(taken: Mapping[str, Times], cell: Row, family: Family) -> list[Row]:
    alone = taken[ALONE]
    spread = abs(taken[f"{ALONE}, again"].over(alone) - 1)
    rows = []
    for name, mine in taken.items():
        schedule, _, transport = name.partition(", ")
        rows.append(
            cell
            | {"schedule": schedule, "transport": transport}
            | {"attention": family.attention.name}
            | {"median_ms": round(mine.median, 3)}
            | {"over_alone": round(mine.over(alone), 4), "spread": round(spread, 4)}
            | {"rounds_ms": [round(ms, 3) for ms in mine.rounds]}
        )
    return rows


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), help="the first words of their names")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every variant")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps in a turn, after one that is not")
    parser.add_argument("--tiny", action="store_true", help="try the script with small models")
    options = parser.parse_args()
    cuda = DEVICE.type == "cuda"
    device = join_ranks(cuda)
    first = dist.get_rank() == 0
    commit = (options.commit or provenance.commit()) if first else ""
    output = options.output or provenance.path("parallel", "family_split")
    settings = {"dtype": "bfloat16", "batch_size": 1, "warm_up": WARM_UP}
    settings |= {"rounds": options.rounds, "repeats": options.repeats, "tiny": options.tiny}
    mesh = SequenceMesh.create(DEVICE.type, ulysses_size=dist.get_world_size())
    transports: dict[str, Transport] = {"collective": CollectiveTransport()}
    if cuda:
        transports["symmetric"] = create_transport(
            "symmetric", mesh, device, timedelta(minutes=1), pending=PENDING["sliced"]
        )
    rows: list[Row] = []
    for name in named(options.models):
        rows += (mine := measure(name, mesh, transports, options))
        if first:
            provenance.write(output, "parallel/family_split", commit, settings, rows)
            show(mine)
        free_cache()
    if first:
        print(f"written to {output}")
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()


def show(rows: list[Row]) -> None:
    head = rows[0]
    print(f"{head['model']}, {head['tokens']} tokens, spread {head['spread']:.3f}", flush=True)
    for row in rows:
        name = f"{row['schedule']}, {row['transport']}"
        print(f"  {name:>20} {row['median_ms']:>9.2f} ms {row['over_alone']:.3f}", flush=True)


if __name__ == "__main__":
    main()
