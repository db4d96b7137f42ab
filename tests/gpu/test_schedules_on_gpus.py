"""The sliced schedule on GPUs: equal to the serial one by every transport, pushed by copy engines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, Transport
from lightning_videoscale.parallel.schedules import PENDING
from lightning_videoscale.parallel.schedules.sliced_input import project_heads
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads
from tests.distributed.pool import ProcessPool
from tests.distributed.test_schedules import run_layer
from tests.models import lifted_float_casts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def transport_of(name: str, mesh: SequenceMesh) -> Transport:
    if name == "collective":
        return CollectiveTransport()
    return SymmetricTransport.create(mesh, device(), timedelta(minutes=1), PENDING["sliced"])


def layer_differences(name: str, count: int) -> tuple[float, int]:
    """The largest difference from serial layers by collectives, and how many tensors were compared."""
    worst, compared = 0.0, 0
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    transport = transport_of(name, mesh)
    with lifted_float_casts():
        for seed in range(count):
            serial = run_layer(mesh, "serial", seed, device="cuda")
            sliced = run_layer(mesh, "sliced", seed, transport, device="cuda")
            for a, b in zip(serial, sliced, strict=True):
                worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-6)))
                compared += 1
    return worst, compared


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_of_random_shapes_equal_serial_ones(gpu_ranks: Ranks, size: int, transport: str) -> None:
    for worst, compared in gpu_ranks(size).run(layer_differences, transport, 100):
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
