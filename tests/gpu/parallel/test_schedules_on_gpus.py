"""The schedules that hide exchanges on GPUs: equal to the serial one by every transport, pushed by copy engines.

Two GPUs are needed, or for all but what copy engines do one of them: ``pytest --share-gpu`` has all ranks on it.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, Transport
from lightning_videoscale.parallel.schedules import HIDING, PENDING, ScheduleName
from lightning_videoscale.parallel.schedules.input_projections import project_heads
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.transport.symmetric_memory import CudaFabric
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads
from tests.distributed.pool import SHARED, ProcessPool
from tests.distributed.schedules.random_layers import random_shape, run_layer
from tests.models import gradient_error, lifted_float_casts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Ranks = Callable[[int], ProcessPool]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def transport_of(name: str, mesh: SequenceMesh) -> Transport:
    if name == "collective":
        return CollectiveTransport()
    if SHARED not in os.environ:
        return SymmetricTransport.create(mesh, device(), timedelta(minutes=1), PENDING["sliced"])
    token = [f"shared-{uuid.uuid4()}"]  # `create` refuses ranks on one GPU, which no training has
    dist.broadcast_object_list(token)
    fabric = CudaFabric(device(), token[0], timedelta(minutes=1))
    return SymmetricTransport(fabric, mesh.ulysses, PENDING["sliced"])


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


def device_activities(layers: int) -> list[str]:
    """What the device does in projections whose slices are pushed."""
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    lengths, heads, dim = (512,) * mesh.ulysses.size, 8, 64
    assigned = assign_heads(mesh.ulysses.rank, lengths, lengths, heads, heads)
    ulysses = Ulysses(mesh.ulysses, assigned, transport_of("symmetric", mesh))
    x = torch.randn(1, 512, heads * dim, device=device(), dtype=torch.bfloat16)
    linears = [(torch.randn(heads * dim, heads * dim, device=device(), dtype=torch.bfloat16), None)] * 3
    project_heads(x, linears, None, ulysses, heads)
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(layers):
            project_heads(x, linears, None, ulysses, heads)
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("size", [2, 4])
def test_slices_are_pushed_by_copy_engines_as_they_are(gpu_ranks: Ranks, size: int) -> None:
    for names in gpu_ranks(size).run(device_activities, layers=5):
        copies = [name for name in names if name.startswith(("Memcpy PtoP", "Memcpy DtoD"))]
        assert len(copies) == 5 * 3 * (size - 1), sorted(set(names))  # of each projection, a slice for every peer
        assert not [name for name in names if "nccl" in name.lower()]
