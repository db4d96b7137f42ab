"""The schedules that hide exchanges on GPUs: equal to the serial one by every transport, pushed by copy engines.

Two GPUs are needed, or for all but what copy engines do one of them: ``pytest --share-gpu`` has all ranks on it.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, Transport
from lightning_videoscale.parallel.schedules import HIDING, PENDING, ScheduleName
from lightning_videoscale.parallel.schedules.input_projections import project_heads
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.transport.symmetric_memory import CudaInterconnect
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads
from tests.distributed.pool import SHARED, ProcessPool
from tests.distributed.schedules.random_layers import random_shape, run_layer
from tests.models import gradient_error, lifted_float_casts

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], ProcessPool]
TOKENS, WIDTH = 512, 512  # of a rank


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def transport_of(name: str, mesh: SequenceMesh) -> Transport:
    if name == "collective":
        return CollectiveTransport()
    if SHARED not in os.environ:
        return SymmetricTransport.create(mesh, device(), timedelta(minutes=1), PENDING["sliced"])
    token = [f"shared-{uuid.uuid4()}"]  # `create` refuses ranks on one GPU, which no training has
    dist.broadcast_object_list(token)
    interconnect = CudaInterconnect(device(), token[0], timedelta(minutes=1))
    return SymmetricTransport(interconnect, mesh.ulysses, PENDING["sliced"])


def layer_differences(name: str, schedule: ScheduleName, count: int) -> tuple[float, int]:
    """The largest difference from serial layers by collectives, and how many tensors were compared."""
    worst, compared = 0.0, 0
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    transport = transport_of(name, mesh)
    with lifted_float_casts():
        for seed in range(count):
            shape = random_shape(random.Random(seed), mesh.ulysses.size, text=bool(seed % 2))
            serial = run_layer(mesh, "serial", shape, device="cuda")
            hiding = run_layer(mesh, schedule, shape, transport, device="cuda")
            worst, compared = max(worst, gradient_error(hiding, serial)), compared + len(serial)
    return worst, compared


@pytest.mark.parametrize("schedule", HIDING)
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_of_random_shapes_equal_serial_ones(
    ranks_on_gpus: Ranks, size: int, transport: str, schedule: ScheduleName
) -> None:
    for worst, compared in ranks_on_gpus(size).run(layer_differences, transport, schedule, 100):
        assert worst < 1e-12 and compared > 900


class Activity(NamedTuple):
    """What a device did."""

    name: str
    nbytes: int


def device_activities(layers: int) -> tuple[list[Activity], list[Activity]]:
    """What the device does in projections whose slices are pushed, forward and then backward."""
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    lengths, heads, dim = (TOKENS,) * mesh.ulysses.size, WIDTH // 64, 64
    assigned = assign_heads(mesh.ulysses.rank, lengths, lengths, heads, heads)
    ulysses = Ulysses(mesh.ulysses, assigned, transport_of("symmetric", mesh))
    weights = [torch.randn(WIDTH, WIDTH, device=device(), dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    x = torch.randn(1, TOKENS, WIDTH, device=device(), dtype=torch.bfloat16).requires_grad_()
    cotangent = torch.randn(1, TOKENS * mesh.ulysses.size, heads // mesh.ulysses.size, dim, device=device()).to(x.dtype)
    outputs: list[Tensor] = []

    def forward() -> None:
        projected = project_heads(x, [(weight, None) for weight in weights], None, ulysses, heads)
        outputs[:] = projected.query, projected.key, projected.value

    def backward() -> None:
        torch.autograd.grad(outputs, [x, *weights], [cotangent.transpose(1, 2)] * 3, retain_graph=True)

    found = []
    for work in (forward, backward):
        work()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(layers):
                work()
            torch.cuda.synchronize()
        found.append(on_the_device(recorded))
    return found[0], found[1]


def on_the_device(recorded: profile) -> list[Activity]:
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kinds = "kernel", "gpu_memcpy", "gpu_memset"
    return [Activity(e["name"], e["args"].get("bytes", 0)) for e in events if e.get("cat") in kinds]


@pytest.mark.parametrize("size", [2, 4])
def test_slices_are_pushed_by_copy_engines_as_they_are(gpu_ranks: Ranks, size: int) -> None:
    layers = 5
    off_rank = 3 * TOKENS * WIDTH * 2 * (size - 1) // size  # bytes, of query, key and value
    for directions in gpu_ranks(size).run(device_activities, layers):
        for activities, own in zip(directions, (0, 3), strict=True):
            names = sorted({activity.name for activity in activities})
            copies = [each for each in activities if each.name.startswith(("Memcpy PtoP", "Memcpy DtoD"))]
            assert len(copies) == layers * 3 * (size - 1), names  # of each projection, a slice for every peer
            assert sum(each.nbytes for each in copies) == layers * off_rank, copies
            assert not [name for name in names if "nccl" in name.lower()]
            # Else products only, and in backward what puts this rank's own columns in their place.
            kernels = [each.name for each in activities if "copy" in each.name.lower() and each not in copies]
            assert len(kernels) == layers * own, names
