"""Blocks that inductor compiles exchange on GPUs by every schedule and transport what eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_videoscale.compat.torch.trees import tree_map_only
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.strategies.blocks import checkpoint_activations
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.families.harness import Case, run
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.gpu.parallel.test_schedules_on_gpus import device, transport_of
from tests.models import gradient_error

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], ProcessPool]
LENGTHS: list[dict[str, Any]] = [{"frames": 2 + n, "text": 5 + 2 * n, "side": 4, "batch": 2} for n in range(3)]
"""Of which a rank has other shares each time, of video and of text."""


def results(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    outputs, loss = run(model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values())
    return {f"output {n}": x for n, x in enumerate(outputs)} | gradients


def differences(family: str, schedule: ScheduleName, name: str, checkpointing: bool) -> tuple[list[float], int]:
    """How far compiled blocks are from eager ones that exchange serially by collectives; and how many graphs."""
    counters.clear()
    cases = [Case(family, settings=lengths, float32=True) for lengths in LENGTHS]
    serial, model = (FAMILIES[family].model(cases[0]).to(device()) for _ in range(2))
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    parallelize(serial, mesh, verify_plan=False)
    parallelize(model, mesh, verify_plan=False, schedule=schedule, transport=transport_of(name, mesh))
    compile_blocks(model, {"fullgraph": True})
    if checkpointing:
        checkpoint_activations(model)
    errors = []
    for case in cases:
        inputs = tree_map_only(Tensor, lambda x: x.to(device()), dict(FAMILIES[family].inputs(case, 0)))
        # The first layer is a convolution, which would round its operands to TF32, and two close ones apart.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            errors.append(gradient_error(results(model, inputs), results(serial, inputs)))
    return errors, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("schedule", ["serial", "overlap", "sliced"])
@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_compiled_blocks_equal_eager_ones(
    ranks_on_gpus: Ranks, family: str, schedule: ScheduleName, transport: str, checkpointing: bool
) -> None:
    for errors, graphs in ranks_on_gpus(2).run(differences, family, schedule, transport, checkpointing):
        assert max(errors) <= 1e-5
        assert graphs == 2
