"""What the `symmetric` transport stands on: memory that peers can write, flags that streams can wait for.

`Memory`, `Interconnect`   the few operations that the transport's protocol needs
`CudaInterconnect`         PyTorch symmetric memory, peer copies by the copy engine, stream memory operations

Of torch's symmetric memory (`compat.torch.distributed`), allocation and the exchange of handles are used, and no
multicast operation. The handles are exchanged in process groups of this file's own, which have a `RendezvousStore` and
no backend.

A flag is a 32-bit number in a rank's memory, 1 if it is set and else 0. A peer sets it by a stream memory operation,
which the driver orders after the copies before it, and the owner's stream waits for it without occupying a
multiprocessor: no kernel spins, so none can keep the kernel from running that it waits for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but missing from the type hints

from lightning_videoscale.compat.torch.cuda import current_raw_stream
from lightning_videoscale.compat.torch.distributed import (
    empty_symmetric,
    map_peers,
    register_group,
    store_of,
    symmetric_backend,
    unregister_group,
)
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.draining import drain
from lightning_videoscale.parallel.transport.peer_watchdog import PeerWatchdog, Taking
from lightning_videoscale.parallel.transport.rendezvous import HostExchanges, RendezvousStore
from lightning_videoscale.ranks import gather_over_ranks

_GRANULE = 2 << 20  # the driver hands out such memory in pieces of 2 MiB
_ANY_MEMORY = 4  # CU_MEMORYTYPE_UNIFIED: the driver tells by the address whose it is
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and _WRITE_VALUE_32


class _Operation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` of a wait or a write, which have the same fields; flags of 0 are "at least"."""

    _fields_: ClassVar = [
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


Operations = ctypes.Array[_Operation]


def _end(name: str) -> list[tuple[str, Any]]:
    """What ``CUDA_MEMCPY2D`` says of where a copy begins, or ends."""
    place = [("host", ctypes.c_void_p), ("address", ctypes.c_uint64), ("array", ctypes.c_void_p)]
    fields = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        *place,
        ("pitch", ctypes.c_size_t),
    ]
    return [(f"{name}_{field}", kind) for field, kind in fields]


class _RowCopy(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_: ClassVar = [*_end("source"), *_end("target"), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class Finished(Protocol):
    """Work on the side stream."""

    def wait(self) -> None:
        """Makes the current stream wait for it."""


class Memory(Protocol):
    """One allocation of the same size on every rank of an axis, all of it writable by all of them.

    Attributes:
        buffers: By rank, uint8, contiguous; writing to another rank's is a peer copy.
        flags: This rank's flags, int32.
        nbytes: Bytes that this rank's part takes.
    """

    buffers: list[Tensor]
    flags: Tensor
    nbytes: int

    def signal(self, rank: int, flag: int) -> None:
        """Sets a flag of ``rank`` once what the current stream holds so far is done."""

    def take(self, flags: Sequence[int]) -> None:
        """Makes the current stream wait until all of these flags of this rank are set, and then clears them."""


class Interconnect(Protocol):
    """Where memory comes from, and the stream that pushes."""

    @property
    def failure(self) -> str | None:
        """Which peers did not come, once one did not."""

    def agree(self, told: Any, axis: Axis, purpose: str) -> list[Any]:
        """Returns what each rank of the axis tells, by rank; the host waits for them. See `HostExchanges.agree`."""

    def allocate(self, nbytes: int, flags: int, axis: Axis) -> Memory:
        """Returns ``nbytes`` of memory per rank and ``flags`` flags, all zero; collective over the axis."""

    def take(self, memory: Memory, ranks: Mapping[int, int]) -> Taking:
        """Has the current stream take flags of a memory; ``ranks`` are those that set them."""

    def aside(self, work: Callable[[], None]) -> Finished:
        """Runs ``work`` on the side stream, after what the current stream holds so far."""

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Copies a matrix on the current stream by no kernel; rows may lie apart, what is within one may not."""

    def watched(self, what: str, memory: Memory, takings: Sequence[Taking]) -> AbstractContextManager[None]:
        """Notes that the current stream's work inside waits for these, some added inside, to name who is missing."""

    def come_to_rest(self, axis: Axis, release: Callable[[Sequence[int]], None]) -> list[str | None]:
        """Waits until the devices of an axis have done all they were given; collective.

        Args:
            axis: The ranks.
            release: Sets this rank's flags for the peers, by position, whose devices are at rest: these set none any
                more. Called again and again, on a stream that is not stuck.

        Returns:
            By rank, why its device does not come to rest; None where it does.
        """

    def renew(self) -> None:
        """Has ranks number their exchanges anew; all of them call it between the same exchanges."""

    def close(self, axis: Axis) -> None:
        """Waits until no rank of the axis uses the memory of another any more, so that it may be freed."""


class CudaMemory:
    """See `Memory`; collective to create.

    Args:
        nbytes: Bytes of data on each rank.
        flags: Number of flags on each rank.
        axis: The ranks.
        group: Name of a process group of these ranks that has a `RendezvousStore`.
        device: This rank's GPU.
        driver: Stream memory operations.
    """

    def __init__(
        self, nbytes: int, flags: int, axis: Axis, group: str, device: torch.device, driver: StreamFlags
    ) -> None:
        offset = -(-4 * flags // 256) * 256  # flags first, then data on 256 bytes
        self.nbytes = -(-(offset + nbytes) // _GRANULE) * _GRANULE
        self._storage = empty_symmetric(self.nbytes, device)
        self._storage[:offset].zero_()
        torch.cuda.synchronize(device)  # zero before any peer can reach it
        # Holds the peers' memory: the tensors below do not.
        self._handle = map_peers(self._storage, group)
        whole = [self._handle.get_buffer(rank, (self.nbytes,), torch.uint8) for rank in range(axis.size)]
        self.buffers = [buffer[offset:] for buffer in whole]
        self.flags = whole[axis.rank][: 4 * flags].view(torch.int32)
        self._addresses = [buffer.data_ptr() for buffer in whole]
        self._rank = axis.rank
        self._driver = driver
        self._known: dict[tuple[str, tuple[int, ...]], Operations] = {}

    def signal(self, rank: int, flag: int) -> None:
        """See `Memory`."""
        self._driver.run(self._operations("signal", (self._addresses[rank] + 4 * flag,)))

    def take(self, flags: Sequence[int]) -> None:
        """See `Memory`."""
        mine = self._addresses[self._rank]
        if flags:
            self._driver.run(self._operations("take", tuple(mine + 4 * flag for flag in flags)))

    def _operations(self, what: str, addresses: tuple[int, ...]) -> Operations:
        """The same ones are run again and again, and take the host long to make."""
        key = what, addresses
        if key not in self._known:
            set_each = [(_WRITE, address, 1) for address in addresses]
            take_all = [(_WAIT, address, 1) for address in addresses] + [(_WRITE, address, 0) for address in addresses]
            self._known[key] = StreamFlags.operations(set_each if what == "signal" else take_all)
        return self._known[key]


class CudaInterconnect:
    """See `Interconnect`."""

    def __init__(self, device: torch.device, token: str, timeout: timedelta) -> None:
        self._device = device
        self._timeout = timeout
        self._driver, self._copies = StreamFlags(), RowCopies()
        self._side = torch.cuda.Stream(device, priority=-1)
        # Of a priority that no stream has which may be stuck, see `PeerWatchdog`.
        self._releasing = torch.cuda.Stream(device, priority=-3)
        self._watch = PeerWatchdog(device, timeout)
        self._exchanges = HostExchanges(token, timeout)
        self._groups: dict[str, tuple[RendezvousStore, dist.ProcessGroup]] = {}

    @property
    def failure(self) -> str | None:
        """See `Interconnect`."""
        return self._watch.failure

    def agree(self, told: Any, axis: Axis, purpose: str) -> list[Any]:
        """See `Interconnect`.

        Raises:
            TimeoutError: With the ranks that did not come.
        """
        return self._exchanges.agree(told, axis, store_of(axis.group), purpose)

    def allocate(self, nbytes: int, flags: int, axis: Axis) -> Memory:
        """See `Interconnect`."""
        name = self._exchanges.name(axis)
        if name not in self._groups:
            store = RendezvousStore(PrefixStore(name, store_of(axis.group)), self._timeout)
            self._groups[name] = store, dist.ProcessGroup(store, axis.rank, axis.size)
            register_group(name, self._groups[name][1])
        return CudaMemory(nbytes, flags, axis, name, self._device, self._driver)

    def take(self, memory: Memory, ranks: Mapping[int, int]) -> Taking:
        """See `Interconnect`."""
        memory.take(list(ranks))
        taken = torch.cuda.Event()
        taken.record()
        return Taking(ranks, taken)

    def aside(self, work: Callable[[], None]) -> Finished:
        """See `Interconnect`."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            work()
        finished: torch.cuda.Event = self._side.record_event()
        return finished

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        """See `Interconnect`."""
        self._copies.run(target, source)

    def watched(self, what: str, memory: Memory, takings: Sequence[Taking]) -> AbstractContextManager[None]:
        """See `Interconnect`; a graph's own waits are not watched."""
        is_recorded = torch.cuda.is_current_stream_capturing()
        return nullcontext() if is_recorded else self._watch.watched(what, memory, takings)

    def close(self, axis: Axis) -> None:
        """See `Interconnect`.

        Raises:
            TimeoutError: With the ranks that did not come.
        """
        torch.cuda.synchronize(self._device)  # copies to peers, and the flags that tell them
        self.agree(None, axis, "to close the transport")
        self.renew()

    def come_to_rest(self, axis: Axis, release: Callable[[Sequence[int]], None]) -> list[str | None]:
        """See `Interconnect`.

        Raises:
            TimeoutError: With the ranks that did not come.
        """
        resting = self._exchanges.begin(axis, store_of(axis.group), "to come to rest in `reset`")

        def release_beside() -> None:
            if self._releasing.query():  # what was set before is set
                with torch.cuda.stream(self._releasing):
                    release(resting.have_told())

        resting.tell(self.failure or drain(lambda: torch.cuda.synchronize(self._device), release_beside, self._timeout))
        return resting.hear()

    def renew(self) -> None:
        """See `Interconnect`."""
        for name in self._groups:
            unregister_group(name)
        self._groups.clear()
        self._exchanges.renew()  # torch keeps the store of the first group of a name


class StreamFlags:
    """Writes of and waits for 32-bit numbers, in the order of the current stream (``cuStreamBatchMemOp``).

    A stream that a CUDA graph records takes them, too.
    """

    def __init__(self) -> None:
        self._run = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
        self._run.restype = ctypes.c_int

    @staticmethod
    def operations(each: Sequence[tuple[int, int, int]]) -> Operations:
        """Returns writes and waits, each with its address and number, as the driver takes them."""
        made = (_Operation * len(each))()
        for operation, (kind, address, value) in zip(made, each, strict=True):
            operation.kind, operation.address, operation.value = kind, address, value
        return made

    def run(self, operations: Operations) -> None:
        """Runs them in their order: a wait until the number is there or a larger one.

        A write comes once everything before it on the stream is done and visible to all devices.
        """
        stream = current_raw_stream(torch.cuda.current_device())
        if status := self._run(stream, len(operations), operations, 0):
            raise RuntimeError(f"The driver refused a stream memory operation with CUresult {status}.")


class RowCopies:
    """Copies of rows that lie apart, by the copy engine (``cuMemcpy2DAsync``): torch would launch a kernel."""

    def __init__(self) -> None:
        self._run = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
        self._run.argtypes = [ctypes.POINTER(_RowCopy), ctypes.c_void_p]
        self._run.restype = ctypes.c_int

    def run(self, target: Tensor, source: Tensor) -> None:
        """Copies a matrix on the current stream, from and to memory that this process has mapped."""
        if not source.numel():
            return
        copy = _RowCopy(width=source.shape[1] * source.itemsize, height=source.shape[0])
        copy.source_kind = copy.target_kind = _ANY_MEMORY
        copy.source_address, copy.source_pitch = source.data_ptr(), source.stride(0) * source.itemsize
        copy.target_address, copy.target_pitch = target.data_ptr(), target.stride(0) * target.itemsize
        if status := self._run(ctypes.byref(copy), current_raw_stream(torch.cuda.current_device())):
            raise RuntimeError(f"The driver refused a copy of rows with CUresult {status}.")


def why_unavailable(axis: Axis, device: torch.device) -> list[str]:
    """Returns what keeps the ranks of an axis from writing into each other's memory, empty if nothing does.

    Collective over all ranks of the job; every rank gets every rank's reasons.
    """
    reasons = _reasons(axis, device, gather_over_ranks(_facts(device)))
    return [reason for theirs in gather_over_ranks(reasons) for reason in theirs]


def _facts(device: torch.device) -> tuple[str, str, str]:
    """What peers need to know of a rank: its host, its GPU, and what it lacks by itself."""
    if device.type != "cuda":
        return "", "", f"its device is {device}, not a GPU"
    with open("/proc/sys/kernel/random/boot_id") as file:  # unlike a host name, one per running kernel
        host = file.read().strip()
    return host, str(torch.cuda.get_device_properties(device).uuid), what_lacks(device)


def what_lacks(device: torch.device) -> str:
    """Returns what keeps a GPU, torch or the driver from symmetric memory, by trying; empty if nothing does."""
    try:
        backend = symmetric_backend(device)
        flag, driver = torch.zeros(1, dtype=torch.int32, device=device), StreamFlags()
        with torch.cuda.device(device):  # drivers before CUDA 12 know the operations but refuse them by default
            driver.run(driver.operations([(_WRITE, flag.data_ptr(), 1), (_WAIT, flag.data_ptr(), 1)]))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} or the driver lacks what is needed ({type(error).__name__}: {error})"
    if backend not in (None, "CUDA"):
        return f"torch's symmetric memory is set to the backend {backend}, and this needs CUDA"
    return ""


def _reasons(axis: Axis, device: torch.device, facts: Sequence[tuple[str, str, str]]) -> list[str]:
    """This rank's reasons, given the facts of all ranks of the job."""
    me = axis.ranks[axis.rank]
    host, gpu, lacks = facts[me]
    if lacks:
        return [f"rank {me}: {lacks}"]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    reasons = []
    for peer in axis.ranks:
        its_host, its_gpu, _ = facts[peer]
        if peer == me or not its_gpu:
            continue
        if its_host != host:
            reasons.append(f"rank {me}: rank {peer} is on another host")
        elif its_gpu == gpu:
            reasons.append(f"rank {me}: rank {peer} uses the same GPU")
        elif its_gpu in visible and not torch.cuda.can_device_access_peer(device, visible[its_gpu]):
            reasons.append(f"rank {me}: no peer access to the GPU of rank {peer}")
    return reasons
