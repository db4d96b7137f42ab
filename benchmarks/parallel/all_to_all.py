"""The symmetric transport's all-to-all beside NCCL's, by message size.

    torchrun --nproc-per-node 4 benchmarks/parallel/all_to_all.py

`symmetric`   peer copies by the copy engines into slots, copied out of them by one kernel
`nccl`        all_to_all_single into a tensor that is there already

Times are CUDA events around one exchange with nothing else on the devices: medians over the repeats, then the largest
over the ranks. "Sent" counts what leaves a GPU, so (N - 1) / N of the message.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import join_ranks
from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport

MIB = (4, 16, 64, 256)
WARM_UP, REPEATS, ROUNDS = 10, 50, 3


def times_us(exchange: Callable[[], Any]) -> list[float]:
    """Microseconds of each repeat on this rank; the ranks start every round together."""
    for _ in range(WARM_UP):
        exchange()
    torch.cuda.synchronize()
    dist.barrier()
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        exchange()
        end.record()
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for begin, end in events]


def slowest(value: float) -> float:
    """The largest of the ranks' values."""
    x = torch.tensor([value], device="cuda")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return round(x.item(), 2)


def measure(mesh: SequenceMesh, transport: SymmetricTransport) -> list[dict[str, Any]]:
    """One row for each size and variant; the variants take turns."""
    ranks = mesh.ulysses.size
    rows = []
    for mib in MIB:
        message = torch.randn(mib * 2**20 // 2 // ranks * ranks, device="cuda", dtype=torch.bfloat16)
        received = torch.empty_like(message)
        sizes = [message.numel() // ranks] * ranks
        variants: dict[str, Callable[[], Any]] = {
            "symmetric": lambda m=message, s=sizes: transport.wait(transport.all_to_all(m, s, s, mesh.ulysses)),
            "nccl": lambda m=message, r=received: dist.all_to_all_single(r, m, group=mesh.ulysses.group),
        }
        variants["nccl"]()
        assert torch.equal(variants["symmetric"](), received)
        times: dict[str, list[list[float]]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, exchange in variants.items():
                times[name].append(times_us(exchange))
        for name, rounds in times.items():
            repeats = [time for times_of_round in rounds for time in times_of_round]
            deciles = statistics.quantiles(repeats, n=10)
            median = slowest(statistics.median(repeats))
            rows.append(
                {
                    "mib_per_rank": mib,
                    "variant": name,
                    "median_us": median,
                    "p10_us": slowest(deciles[0]),
                    "p90_us": slowest(deciles[-1]),
                    "median_of_rounds_us": [slowest(statistics.median(times_of_round)) for times_of_round in rounds],
                    "sent_gb_per_s": round((ranks - 1) / ranks * message.nbytes / median / 1e3, 1),
                }
            )
    return rows


def main() -> None:
    parser = provenance.parser(__doc__)
    arguments = parser.parse_args()
    device = join_ranks(on_gpus=True)
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    commit = (arguments.commit or provenance.commit()) if mesh.ulysses.rank == 0 else ""
    transport = SymmetricTransport.create(mesh, device, timedelta(seconds=60))
    rows = measure(mesh, transport)
    if mesh.ulysses.rank == 0:
        output = arguments.output or provenance.path("parallel", "all_to_all")
        settings = {
            "ranks": mesh.ulysses.size,
            "dtype": "bfloat16",
            "warmup": WARM_UP,
            "repeats": REPEATS,
            "rounds": ROUNDS,
            "symmetric_memory_bytes": transport.memory_bytes,
        }
        provenance.write(output, "parallel/all_to_all", commit, settings, rows)
        print(f"{'MiB per rank':>12} {'variant':>10} {'median us':>10} {'p10':>9} {'p90':>9} {'sent GB/s':>10}")
        for row in rows:
            print(
                f"{row['mib_per_rank']:>12} {row['variant']:>10} {row['median_us']:>10} {row['p10_us']:>9} "
                f"{row['p90_us']:>9} {row['sent_gb_per_s']:>10}"
            )
        print(f"written to {output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
