"""Every family by CUDA graphs gives the losses and gradients that it gives without, split over two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_map_only
from lightning_videoscale.graphs import GraphedNetwork, GraphOptions
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.ranks import gather_over_ranks
from tests.distributed.families.harness import Case, run
from tests.distributed.families.test_parity import FAMILIES, FUSED
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]
LENGTHS = {"text": 9, "frames": 3, "side": 5, "batch": 2}
STEPS = 6
REPLAYED = STEPS - 2

READS_THE_DEVICE = {
    "hunyuan_video_framepack": "reads from its mask how long each text is",
    "hunyuan_video_15": "asks whether the image is zero",
}
"""Families whose own forward decides on the host by numbers of the device, which no graph can repeat."""


class Found(NamedTuple):
    """Of a case: the largest errors beside calls without graphs, how many calls were replayed, and the log."""

    case: str
    loss: float
    gradients: float
    replayed: int
    log: list[str]


def by_graphs(network: nn.Module, mesh: SequenceMesh, log: list[str]) -> GraphedNetwork:
    def gather(mine: Any) -> list[Any]:
        return gather_over_ranks(mine, group=mesh.sp.group)

    options = GraphOptions(True, 0.5)
    graphed = GraphedNetwork(network, network.forward, [], options, gather, int, int, True, log.append)
    network.forward = graphed
    return graphed


def compare(cases: list[Case]) -> list[Found]:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", dist.get_rank())
    found = []
    for case in cases:
        family, log = FAMILIES[case.family], list[str]()
        eager, other = family.model(case).to(device), family.model(case).to(device)
        with SequenceMesh.create("cuda", ulysses_size=2) as mesh:
            for network in (eager, other):
                if case.fused:
                    inject_fused_kernels(network)
                parallelize(network, mesh, verify_plan=False)
            graphed = by_graphs(other, mesh, log)
            losses, errors = [], []
            for step in range(STEPS):
                inputs = tree_map_only(Tensor, lambda x: x.to(device), family.inputs(case, step))
                gradients = []
                for network in (eager, other):
                    network.zero_grad()
                    _, loss = run(network, inputs)
                    loss.backward()
                    losses.append(loss.item())
                    gradients.append({n: p.grad for n, p in network.named_parameters() if p.grad is not None})
                errors.append(gradient_error(gradients[1], gradients[0]))
            counts = graphed.counts
            graphed.close()
        pairs = zip(losses[::2], losses[1::2], strict=True)
        of_loss = max(abs(replayed / expected - 1) for expected, replayed in pairs)
        found.append(Found(str(case), of_loss, max(errors), counts["replayed"], log))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_by_graphs(gpu_ranks: Ranks, family: str) -> None:
    cases = [
        Case(family, (1, 1, 2), {**LENGTHS, **variant}, place % 2 == 1, float32=True, fused=family in FUSED)
        for place, variant in enumerate(FAMILIES[family].variants)
    ]
    replayed = 0 if family in READS_THE_DEVICE else REPLAYED
    wrong = [
        str(found)
        for of_rank in gpu_ranks(2).run(compare, cases)
        for found in of_rank
        if found.replayed != replayed or max(found.loss, found.gradients) > 1e-5
    ]
    assert not wrong, "\n".join(wrong)
