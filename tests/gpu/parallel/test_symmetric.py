"""The symmetric transport on GPUs: equal to the collective one, safe with late readers, pushed by copy engines.

Many layers with delays, and `reset`: `test_symmetric_layers`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_videoscale.parallel import Axis, CollectiveTransport, SequenceMesh, sequence_parallel_attention
from lightning_videoscale.parallel.transport.exchanges import PushedExchange
from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from tests.distributed.pool import ProcessPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def symmetric(mesh: SequenceMesh, timeout: float = 60.0) -> SymmetricTransport:
    return SymmetricTransport.create(mesh, device(), timedelta(seconds=timeout), slots=4)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def start(transport: CollectiveTransport, axis: Axis, shares: tuple[Sequence[int], Sequence[int]], x: Tensor) -> Tensor:
    """Starts an exchange of pieces of ``tokens · heads`` elements of x."""
    tokens, heads = shares
    send = [tokens[axis.rank] * share for share in heads]
    receive = [share * heads[axis.rank] for share in tokens]
    return transport.all_to_all(x[: sum(send)], send, receive, axis)


# -- equal to collectives ------------------------------------------------------------------------------------------


def message_equality() -> list[bool]:
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    transport, axis, shape = symmetric(mesh), mesh.ulysses, random.Random(2)
    equal = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        for _ in range(10):
            shares = ([shape.randint(1, 999) for _ in axis.ranks], [shape.randint(1, 99) for _ in axis.ranks])
            elements = torch.randint(256, (shares[0][axis.rank] * sum(shares[1]),), device=device()).to(dtype)
            results = [how.wait(start(how, axis, shares, elements)) for how in (CollectiveTransport(), transport)]
            equal.append(torch.equal(*results))
    return equal


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_any_dtype_and_size(gpu_ranks: Ranks, size: int) -> None:
    for equal in gpu_ranks(size).run(message_equality):
        assert all(equal) and len(equal) == 40


def attention_differences(shapes: int, ulysses_size: int, ring_size: int) -> tuple[float, int]:
    mesh = SequenceMesh.create("cuda", ulysses_size=ulysses_size, ring_size=ring_size)
    transport = symmetric(mesh)
    shape = random.Random(1)  # of the same mind on all ranks
    torch.manual_seed(dist.get_rank())
    worst = 0.0
    for _ in range(shapes):
        batch, dim, group = shape.randint(1, 3), shape.choice((4, 8, 20)), shape.choice((1, 1, 1, 2))
        lengths = tuple(shape.randint(1, 40) for _ in range(mesh.sp.size))
        kv_heads = shape.randint(-(-ulysses_size // group), 9)
        heads = {"query": kv_heads * group, "key": kv_heads, "value": kv_heads}
        length = lengths[mesh.sp.rank]
        inputs = [torch.randn(batch, length, h, dim, device=device(), dtype=torch.float64) for h in heads.values()]
        cotangent = torch.randn_like(inputs[0])
        results = []
        for how in (CollectiveTransport(), transport):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = sequence_parallel_attention(leaves[0], leaves[1], leaves[2], mesh, lengths=lengths, transport=how)
            results.append([out, *torch.autograd.grad(out, leaves, cotangent)])
        worst = max(worst, *(relative(got, expected) for expected, got in zip(*results, strict=True)))
    return worst, transport.memory_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_attention_and_its_gradients_over_random_shapes(gpu_ranks: Ranks, size: int) -> None:
    for worst, memory_bytes in gpu_ranks(size).run(attention_differences, 200, ulysses_size=size, ring_size=1):
        assert worst <= 1e-13
        assert 0 < memory_bytes <= 64 << 20 and memory_bytes % (2 << 20) == 0


@pytest.mark.parametrize("ring_size", [1, 2])
def test_groups_that_are_part_of_the_job(gpu_ranks: Ranks, ring_size: int) -> None:
    for worst, _ in gpu_ranks(4).run(attention_differences, 20, ulysses_size=2, ring_size=ring_size):
        assert worst <= 1e-13


def growing_apart() -> list[bool]:
    """Ranks 0 and 1 take larger memory three times, ranks 2 and 3 once; then all four exchange."""
    pairs = SequenceMesh.create("cuda", ulysses_size=2)
    x = torch.arange(1 << 12, device=device(), dtype=torch.float32)
    apart = symmetric(pairs, timeout=10.0)
    for tokens in (64, 256, 512) if dist.get_rank() < 2 else (64,):
        apart.wait(start(apart, pairs.ulysses, ([tokens] * 2, [2] * 2), x))
    mesh = SequenceMesh.create("cuda", ulysses_size=4)
    together, shares = symmetric(mesh, timeout=10.0), ([64] * 4, [2] * 4)
    results = [how.wait(start(how, mesh.ulysses, shares, x)) for how in (CollectiveTransport(), together)]
    return [torch.equal(*results), apart.memory_bytes > 0]


def test_groups_that_took_memory_differently_often_meet(gpu_ranks: Ranks) -> None:
    assert gpu_ranks(4).run(growing_apart) == [[True, True]] * 4


def columns_by_both_transports() -> tuple[int, int]:
    """Draws, and how many were equal: several on their way, of uneven rows and columns, in slots used again."""
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    together, axis, shapes, equal = symmetric(mesh), mesh.ulysses, random.Random(5), 0
    count = 40
    for number in range(count):
        lengths, widths = ([shapes.randint(least, 700) for _ in range(axis.size)] for least in (0, 1))
        samples, dtype = shapes.randint(1, 3), shapes.choice([torch.bfloat16, torch.float32, torch.float64])
        generator = torch.Generator(device()).manual_seed(100 * number + axis.rank)
        found: list[list[torch.Tensor]] = [[], []]
        sent = [
            torch.randn(sum(lengths), samples, widths[axis.rank], device=device(), generator=generator).to(dtype)
            for _ in range(1 + number % 4)
        ]
        for how, into in zip((CollectiveTransport(), together), found, strict=True):
            coming = [how.begin_columns(columns, lengths, widths, axis) for columns in sent]
            for each in coming:
                into.append(each.wait(keep=True))
                each.done()
        equal += all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return count, equal


@pytest.mark.parametrize("size", [2, 4])
def test_columns_come_to_lie_beside_each_other(gpu_ranks: Ranks, size: int) -> None:
    for count, equal in gpu_ranks(size).run(columns_by_both_transports):
        assert equal == count


# -- safe with late readers ----------------------------------------------------------------------------------------


def without_guard(take: Callable[[list[int]], None], first_guarding: int, flags: Sequence[int]) -> None:
    take([flag for flag in flags if flag < first_guarding])


def late_reader(guard: bool) -> list[bool]:
    """Rank 0 sends everything at once and copies the first message out a tenth of a second late."""
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    transport, axis = symmetric(mesh), mesh.ulysses
    shares = [1 << 10] * axis.size, [1 << 10] * axis.size
    messages = [torch.full((axis.size << 20,), number, device=device()) for number in range(9)]
    for message in messages[:4]:
        transport.wait(start(transport, axis, shares, message))
    if not guard:
        for slot in transport._slots[PushedExchange]:
            memory = cast(Any, slot.memory)
            memory.take = partial(without_guard, memory.take, len(memory.flags) // 2)
    torch.cuda.synchronize()
    dist.barrier()
    reading = torch.cuda.Stream()
    tokens = [start(transport, axis, shares, message) for message in messages[4:8]]
    reading.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reading):
        if axis.rank == 0:
            torch.cuda._sleep(200_000_000)
        results = [transport.wait(tokens[0])]
    # Not after `reading`: the last message goes out while the first has not been read.
    tokens.append(start(transport, axis, shares, messages[8]))
    if not guard:  # a flag that was set twice is taken once: what is sent last would be waited for in vain
        torch.cuda.synchronize()
        return [bool((result == 4).all()) for result in results]
    with torch.cuda.stream(reading):
        results += [transport.wait(token) for token in tokens[1:]]
    torch.cuda.synchronize()
    return [bool((result == number).all()) for number, result in enumerate(results, 4)]


@pytest.mark.parametrize("size", [2, 4])
def test_a_slot_is_not_reused_before_its_reader_is_done(gpu_ranks: Ranks, size: int) -> None:
    assert gpu_ranks(size).run(late_reader, guard=True) == [[True] * 5] * size
    # Were it not for the flag that the reader sets, the fifth message would lie where the first is read.
    assert gpu_ranks(size).run(late_reader, guard=False)[0][0] is False


# -- pushed by the copy engines ------------------------------------------------------------------------------------


def device_activities(exchanges: int) -> list[str]:
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    transport, axis = symmetric(mesh), mesh.ulysses
    shares = [500] * axis.size, [1000] * axis.size
    message = torch.randn(axis.size * 500_000, device=device(), dtype=torch.bfloat16)
    transport.wait(start(transport, axis, shares, message))
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(exchanges):
            transport.wait(start(transport, axis, shares, message))
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("size", [2, 4])
def test_pushes_are_copies_of_memory_and_no_kernel_communicates(gpu_ranks: Ranks, size: int) -> None:
    for names in gpu_ranks(size).run(device_activities, exchanges=10):
        copies = [name for name in names if name.startswith(("Memcpy PtoP", "Memcpy DtoD"))]
        assert len(copies) == 10 * (size - 1), sorted(set(names))
        assert not [name for name in names if "nccl" in name.lower()]
        kernels = [name for name in names if not name.startswith(("Mem", "Activity", "Context", "Stream", "Event"))]
        assert len(kernels) == 10, sorted(set(kernels))  # one that copies out, per exchange


# -- a peer that does not come -------------------------------------------------------------------------------------


def reset_error(transport: SymmetricTransport) -> str:
    try:
        transport.reset()
    except RuntimeError as error:
        return str(error)
    return "no error"


def left_alone() -> list[str]:
    mesh = SequenceMesh.create("cuda", ulysses_size=2)
    transport, axis = symmetric(mesh, timeout=2.0), mesh.ulysses
    x = torch.ones(64, device=device())
    transport.wait(start(transport, axis, ([4, 4], [4, 4]), x))
    torch.cuda.synchronize()
    began = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(10)
        return [reset_error(transport)]
    messages = []
    try:
        start(transport, axis, ([4, 4], [8, 8]), x)
    except TimeoutError as error:
        messages.append(str(error))
    transport.wait(start(transport, axis, ([4, 4], [4, 4]), x))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        messages.append(str(error))
    try:
        start(transport, axis, ([4, 4], [4, 4]), x)
    except RuntimeError as error:
        messages.append(str(error))
    time.sleep(max(began + 10 - time.monotonic(), 0))
    return [*messages, reset_error(transport)]


def test_a_missing_peer_is_named_within_the_timeout() -> None:
    """It comes late, to a device that has failed: `reset` says so on both ranks."""
    pool = ProcessPool(2, "nccl")
    try:
        (sizes, device_error, exchange, reset), (of_peer,) = pool.run(left_alone)
    finally:
        pool.stop()  # the device cannot be used again by these processes
    assert "Rank 0 waited 0:00:02 for ranks [1] of the ulysses axis to tell the sizes" in sizes
    assert "CUDA" in device_error
    assert "An exchange of the ulysses axis on rank 0 waited 0:00:02 for ranks [1], which did not come" in exchange
    for message in (reset, of_peer):
        assert f"rank 0: {exchange}" in message and "rank 1:" not in message
