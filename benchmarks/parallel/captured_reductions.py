"""All-reduces of gradients behind the parts of a captured backward, beside all-reduces that are captured in it.

    torchrun --nproc-per-node 2 benchmarks/parallel/captured_reductions.py

Forward and backward of blocks of Wan-1.3B with fused kernels in bf16-mixed, a clip on each GPU or one split over all:
as many blocks as leave room for each way's graphs. Ways to average gradients take turns:

- ``behind 4 parts``: as the strategies do. Backward is four graphs, and DDP launches the all-reduces of what is
  finished beside the next ones.
- ``behind 8 parts`` and ``behind all``: likewise, with backward in eight graphs and in one.
- ``captured``: forward, loss and backward are one graph, with each bucket's all-reduce in it as soon as it is full.
  Buckets are as large as DDP's.

``none`` averages nothing. ``difference`` is how far the gradients of the first way and of the last are apart, by their
norm. ``--tiny`` tries the script on CPUs, without graphs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.timing import Times, alternate
from benchmarks.wan_training import TINY_WAN, WAN_1_3B
from lightning_videoscale.graphs import GraphedNetwork, GraphOptions, Recorder
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.auxiliary_loss import context_of
from lightning_videoscale.parallel.transport import create_transport
from lightning_videoscale.ranks import gather_over_ranks

CUDA = torch.cuda.is_available()
LATENTS = {4_680: (3, 60, 104), 14_040: (9, 60, 104)}  # by tokens
BLOCKS = {4_680: 12, 14_040: 5}
BUCKET = 25 * 2**20  # bytes, as DDP's
WARM_UP, REPEATS, ROUNDS = 24, 6, 10  # ranks that share a clip compare their inputs in the first 20 calls
STRATEGIES_WAY = "behind 4 parts"
PARTS = {STRATEGIES_WAY: 4, "behind 8 parts": 8, "behind all": 1, "none": 4}
Row = dict[str, Any]


class Clip:
    """A network, its inputs, and its loss; ranks that share no clip have inputs of their own."""

    def __init__(self, tokens: int, device: torch.device, tiny: bool, *, is_shared: bool) -> None:
        config = TINY_WAN if tiny else WAN_1_3B | {"num_layers": BLOCKS[tokens]}
        torch.manual_seed(0)
        with device:
            self.network = WanTransformer3DModel(qk_norm="rms_norm_across_heads", cross_attn_norm=True, **config)
            inject_fused_kernels(self.network)
            torch.manual_seed(0 if is_shared else dist.get_rank())
            latents = torch.randn(1, 16, *((2, 8, 8) if tiny else LATENTS[tokens]))
            text = torch.randn(1, 8 if tiny else 512, config["text_dim"])
            self.inputs = latents, torch.tensor([500.0]), text

    def loss(self, network: nn.Module) -> Tensor:
        with torch.autocast(self.inputs[0].device.type, torch.bfloat16):
            (velocity,) = network(*self.inputs, return_dict=False)
        return nn.functional.mse_loss(velocity.float(), self.inputs[0])


def by_ddp(
    clip: Clip, mesh: SequenceMesh | None, segments: int, closing: ExitStack, *, reduced: bool
) -> Callable[[], object]:
    """Steps of DDP around a network that runs by graphs, which end with ``closing``."""
    network = clip.network
    blocks = list(network.blocks)
    segments = min(segments, len(blocks))
    entrances = [blocks[len(blocks) * number // segments] for number in range(1, segments)]
    gather = None if mesh is None else partial(gather_over_ranks, group=mesh.sp.group)
    options = GraphOptions(CUDA, 0.5, segments)
    graphed = GraphedNetwork(network, network.forward, entrances, options, gather, int, int, True, print)
    closing.callback(graphed.close)
    network.forward = graphed  # type: ignore[method-assign]
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)

    def run() -> None:
        ddp.zero_grad()
        with nullcontext() if reduced else ddp.no_sync():
            clip.loss(ddp).backward()

    return run


class Buckets:
    """Gradients that are averaged as soon as those of a bucket are complete, the last layers' first."""

    def __init__(self, network: nn.Module) -> None:
        self._works: list[Any] = []
        self._number: dict[nn.Parameter, int] = {}  # of its bucket
        self._buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(list(network.parameters())):
            if sum(4 * p.numel() for p in self._buckets[-1]) >= BUCKET:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
            self._number[parameter] = len(self._buckets) - 1
            parameter.register_post_accumulate_grad_hook(self._completed)
        self._left = list(map(len, self._buckets))
        self._flat = [parameters[0].new_empty(sum(p.numel() for p in parameters)) for parameters in self._buckets]

    def _completed(self, parameter: Tensor) -> None:
        number = self._number[parameter]  # type: ignore[index]
        self._left[number] -= 1
        if self._left[number] == 0:
            parameters, flat = self._buckets[number], self._flat[number]
            torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=flat)
            self._works.append(dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True))

    def finish(self) -> None:
        """Waits for all, whose averages become the gradients."""
        for work in self._works:
            work.wait()
        for parameters, flat in zip(self._buckets, self._flat, strict=True):
            views = flat.split([p.numel() for p in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view.view_as(parameter)
        self._works, self._left = [], list(map(len, self._buckets))


def captured(clip: Clip, device: torch.device) -> Callable[[], object]:
    """Steps of one graph that contains its all-reduces."""
    buckets = Buckets(clip.network)

    def run() -> None:
        clip.network.zero_grad()
        clip.loss(clip.network).backward()
        buckets.finish()

    if not CUDA:
        return run
    recorder, context = Recorder(device), context_of(clip.network)
    with recorder.stream():
        for _ in range(WARM_UP):
            run()
    # A split network sets generators where its region begins, which is before the capture then.
    with nullcontext() if context is None else context.randomness.held(device):
        return recorder.repeat(run)


def difference(networks: list[nn.Module]) -> float:
    """The norm of what is between two networks' gradients, by the second's."""
    mine, others = (
        torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]) for network in networks
    )
    return float((mine - others).norm() / others.norm())


def measure(tokens: int, mesh: SequenceMesh | None, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """The rows of a length: of a clip on each GPU, or of one that all ranks of a mesh share."""
    names = [*PARTS, "captured"]
    clips = {name: Clip(tokens, device, options.tiny, is_shared=mesh is not None) for name in names}
    with ExitStack() as closing:
        if mesh is not None:
            transport = create_transport("symmetric" if CUDA else "collective", mesh, device, timedelta(minutes=1))
            closing.callback(transport.close)
            for clip in clips.values():
                parallelize(clip.network, mesh, transport=transport, verify_plan=False)
        runs: dict[str, Callable[[], object]] = {
            name: by_ddp(clips[name], mesh, segments, closing, reduced=name != "none")
            for name, segments in PARTS.items()
        }
        runs["captured"] = captured(clips["captured"], device)
        for _ in range(WARM_UP):
            for run in runs.values():
                run()
        apart = difference([clips["captured"].network, clips[STRATEGIES_WAY].network])
        taken = alternate(runs, device=device, warm_up=1, repeats=options.repeats, rounds=options.rounds)
        runs.clear()  # NCCL waits for graphs when its groups end
    base = taken[STRATEGIES_WAY]
    cell = {
        "gpus": dist.get_world_size(),
        "tokens": tokens,
        "blocks": len(clips["none"].network.blocks),
        "layout": f"{1 if mesh is None else mesh.sp.size}x1",
    }
    return [cell | row_of(name, times, base) | {"difference": float(f"{apart:.2e}")} for name, times in taken.items()]


def row_of(name: str, times: Times, base: Times) -> Row:
    return {
        "reductions": name,
        "median_ms": round(times.median, 3),
        "over_strategies_way": round(times.over(base), 4),
        "round_medians_ms": [round(ms, 3) for ms in times.rounds],
    }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LATENTS), choices=list(LATENTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="steps of each way in a round")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs with gloo and a small model")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    mesh = SequenceMesh.create(device.type, ulysses_size=dist.get_world_size())
    output = options.output or provenance.path("parallel", "captured_reductions")
    settings = {"dry_run": options.tiny, "rounds": options.rounds, "repeats": options.repeats}
    rows: list[Row] = []
    for tokens, of_clip in product(options.tokens, (None, mesh)):
        rows += measure(tokens, of_clip, device, options)
        if dist.get_rank() == 0:
            for row in rows[-len(PARTS) - 1 :]:
                print({name: value for name, value in row.items() if name != "round_medians_ms"}, flush=True)
            provenance.write(output, "parallel/captured_reductions", commit, settings, rows)
    mesh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
