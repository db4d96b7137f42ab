"""What averaging gradients takes from a step whose ranks are not ready at the same time, by how the exchange begins.

    python benchmarks/strategies/gradient_exchange.py    # on two GPUs

Blocks of Wan-1.3B with fused kernels train under DDP with activation checkpointing in bf16-mixed; rank 1 has the
longer clip by a few percent, or both have the same. NCCL's kernel of an all-reduce takes its multiprocessors when a
rank has the bucket ready, and holds them until the other ranks have it too: of the ranks that are ahead, backward gets
slower. Ways to begin take turns:

- ``at once``: as torch does.
- ``when all are ready``: an all-reduce of one number goes before each bucket's, and holds one multiprocessor.
- ``…, high priority``: likewise, in a group whose stream goes before the computing one.
- ``few blocks``: in a group whose kernels may take `MAX_CTAS` multiprocessors.
- ``after backward``: all buckets when the last gradient is there, so that nothing is hidden.

A computing kernel that takes long lets kernels of other streams begin at its end, unless their priority is higher.

``none`` averages nothing. ``backward_ms`` is until a rank's own last gradient, before it waits for others. The step
takes what the slowest rank does. ``--tiny`` tries the script on CPUs.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow
from lightning_videoscale.injection import inject_fused_kernels

BENCHMARK = "strategies/gradient_exchange"
MAX_CTAS = 4
FRAMES, HEIGHT = 21, 60  # of the latents: 630 tokens to two columns
WIDTHS = {"short": (2, 2), "equal": (100, 100), "2 %": (100, 102), "10 %": (100, 110)}
"""Of the latents of both ranks, by how much more the second has."""
WAYS: dict[str, tuple[str, bool]] = {
    "none": ("", False),
    "at once": ("plain", False),
    "when all are ready": ("plain", True),
    "at once, high priority": ("high priority", False),
    "when all are ready, high priority": ("high priority", True),
    "few blocks": ("few blocks", False),
    "few blocks, high priority": ("few blocks, high priority", False),
    "after backward": ("plain", False),
}
"""A group, and whether all wait for all before an all-reduce."""
Row = dict[str, Any]


class Average:
    """A communication hook of DDP whose way may be changed between steps."""

    def __init__(self, device: torch.device) -> None:
        self.way, self._device = "at once", device
        self._groups = {"plain": dist.new_group()}
        if device.type == "cuda":
            for name in ("high priority", "few blocks", "few blocks, high priority"):
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream="high" in name)
                if "few" in name:
                    options.config.max_ctas = MAX_CTAS
                self._groups[name] = dist.new_group(pg_options=options)
        self._ready = torch.zeros(1, device=device)
        self._held: list[tuple[Tensor, Future[Tensor]]] = []
        self.computed = self._now()

    def ways(self) -> list[str]:
        """Those that this device has."""
        return [way for way, (group, _) in WAYS.items() if not group or group in self._groups]

    def __call__(self, bucket: Any) -> Future[Tensor]:
        name, waits = WAYS[self.way]
        group = self._groups[name]
        if bucket.is_last():
            self.computed = self._now()
        averaged = bucket.buffer().div_(dist.get_world_size())
        if waits:
            dist.all_reduce(self._ready, group=group, async_op=True)
        if self.way != "after backward":
            return _all_reduce(averaged, group)
        later: Future[Tensor] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        self._held.append((averaged, later))
        if bucket.is_last():
            for held, future in self._held:
                _all_reduce(held, group).then(lambda done, future=future: future.set_result(done.value()))
            self._held = []
        return later

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_step(self, ddp: DistributedDataParallel, step: Any) -> tuple[float, float]:
        """Milliseconds of this rank until its last gradient, and until all are averaged."""
        exchanges = bool(WAYS[self.way][0])
        ddp.zero_grad()
        dist.barrier()
        begin = self._now()
        with nullcontext() if exchanges else ddp.no_sync():
            step()
        end = self._now()
        computed = self.computed if exchanges else end
        if self._device.type == "cpu":
            return 1e3 * (computed - begin), 1e3 * (end - begin)
        torch.cuda.synchronize()
        return begin.elapsed_time(computed), begin.elapsed_time(end)


def measure(config: dict[str, int], cases: dict[str, list[int]], rounds: int, tiny: bool, **task: Any) -> None:
    """All cases, in one process group; after each, rank 0 writes what there is."""
    dist.init_process_group("gloo" if tiny else "nccl", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if not tiny:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with device:
        module = RectifiedFlow(config, attention="default" if tiny else "flash")
    inject_fused_kernels(module)
    module.transformer.enable_gradient_checkpointing()
    network = _Loss(module)
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=task["settings"]["bucket_mb"])
    average, rows = Average(device), list[Row]()
    ddp.register_comm_hook(average, lambda average, bucket: average(bucket))  # which would check its annotations
    frames, height = (3, 8) if tiny else (FRAMES, HEIGHT)
    length = frames * height // 4  # tokens by width
    for case, widths in cases.items():
        batch = {"latents": torch.randn(1, 16, frames, height, widths[rank], device=device)}

        def step(batch: dict[str, Tensor] = batch) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = ddp(batch)
            module.backward(loss)

        for way in average.ways():  # kernels, communicators, and DDP's buckets are made
            average.way = way
            average.time_step(ddp, step)
        taken: dict[str, list[list[float]]] = {way: [] for way in average.ways()}
        order = random.Random(0)  # alike on all ranks
        for way in (way for _ in range(rounds) for way in order.sample(list(taken), len(taken))):
            average.way = way
            mine = torch.tensor(average.time_step(ddp, step), device=device)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            taken[way].append(torch.cat(everyone).tolist())
        rows += [{"case": case, "tokens": [length * w for w in widths]} | row_of(way, taken) for way in taken]
        if rank == 0:
            for row in rows[-len(taken) :]:
                say(str(row))
            provenance.write(Path(task["output"]), BENCHMARK, task["commit"], task["settings"], rows)
    finish(len(rows))
    dist.destroy_process_group()


def _all_reduce(values: Tensor, group: Any) -> Future[Tensor]:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    future: Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


class _Loss(torch.nn.Module):
    """The loss as a forward, as DDP needs it."""

    def __init__(self, module: RectifiedFlow) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module.training_step(batch)


def row_of(way: str, taken: dict[str, list[list[float]]]) -> Row:
    """Medians over the rounds, of which each has every rank's two times; ratios are of the same round."""
    backward = [statistics.median(values) for values in zip(*(r[::2] for r in taken[way]), strict=True)]
    steps, alone = ([max(r[1::2]) for r in taken[name]] for name in (way, "none"))
    over = [step / without for step, without in zip(steps, alone, strict=True)]
    of_rank = [
        [mine[2 * rank] / without[2 * rank] for mine, without in zip(taken[way], taken["none"], strict=True)]
        for rank in range(len(backward))
    ]
    return {
        "way": way,
        "step_ms": round(statistics.median(steps), 3),
        "over_none": round(statistics.median(over), 4),
        "over_none_quartiles": [round(q, 4) for q in statistics.quantiles(over, n=4)[::2]] if len(over) > 1 else over,
        "backward_ms": [round(value, 3) for value in backward],
        "backward_over_none": [round(statistics.median(ratios), 4) for ratios in of_rank],
    }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of Wan-1.3B's 30")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=25, help="of DDP, whose own default is this")
    parser.add_argument("--cases", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    config = TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    settings = {"model": config, "rounds": options.rounds, "dry_run": options.tiny, "max_ctas": MAX_CTAS}
    settings |= {"bucket_mb": options.bucket_mb}
    launch(
        __file__,
        2,
        config=config,
        cases={
            case: [w // 5 * 2 or 2 for w in WIDTHS[case]] if options.tiny else WIDTHS[case] for case in options.cases
        },
        rounds=options.rounds,
        tiny=options.tiny,
        output=str((options.output or provenance.path("strategies", "gradient_exchange")).absolute()),
        commit=options.commit or provenance.commit(),
        settings=settings,
    )


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
