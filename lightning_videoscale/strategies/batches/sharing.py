"""One rank's batch for all ranks of a sequence-parallel group.

`BatchSharing.broadcast`  starts to send a batch from one rank to the others (collective over the group)
`PendingBatch.wait`       waits for its arrival and returns the batch

What a batch is made of is broadcast as one small message between the hosts; its tensors follow in the background, so
that they are there when they are needed: between devices over a communicator and a stream of their own, or over gloo
where they shall arrive in host memory. Nothing here starts a thread: all ranks of a group run the same program, so they
broadcast and wait in the same order, and no two collectives can overtake each other.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.ranks import gather_over_ranks

_Value = TypeVar("_Value")


class BatchSharing:
    """Sends batches from any rank of a sequence-parallel group to its others; collective over all ranks to create."""

    def __init__(self, mesh: SequenceMesh, device: torch.device) -> None:
        self.axis, self.dp = mesh.sp, mesh.dp
        self._device = device
        # Groups that nothing else uses: descriptions of batches and tensors in host memory, tensors on the device, and
        # what readers of other batches tell each other.
        self._messages = mesh.duplicate(mesh.sp, "gloo")
        self._transfers = mesh.duplicate(mesh.sp) if device.type != "cpu" else self._messages
        self._streams = mesh.duplicate(mesh.dp, "gloo")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: list[PendingBatch] = []

    def gather(self, value: _Value) -> list[_Value]:
        """Returns the values of all ranks that share; collective over them."""
        return gather_over_ranks(value, self._messages.group)

    def gather_over_streams(self, value: _Value) -> list[_Value]:
        """Returns the values of the ranks that read other batches at the same time; collective over them."""
        return gather_over_ranks(value, self._streams.group)

    def broadcast(self, source: int, produce: Callable[[], Any], *, to_device: bool, digest: int = 0) -> PendingBatch:
        """Starts sharing one batch; collective over the axis.

        Returns as soon as all ranks know what comes, while its tensors are on their way.

        Args:
            source: Whose batch it is, as a position on the axis.
            produce: Called on the source only, and returns the batch: any picklable object, with tensors anywhere in
                it. A ``StopIteration`` tells all ranks that there is none; any other error is theirs too.
            to_device: Whether all tensors shall arrive on the device, else each arrives where it lies on the source:
                in host memory or on the device.
            digest: Of what this rank expects, for all ranks to compare.
        """
        rank = self.axis.ranks[source]
        mine = self.axis.rank == source
        description, tensors, error = _describe(produce, to_device) if mine else (None, [], None)
        try:
            digests, description = self._broadcast_description(description, digest, rank)
        except RuntimeError as failure:
            failure.add_note(f"Ranks {list(self.axis.ranks)} were sharing a batch that rank {rank} reads.")
            raise
        if not isinstance(description, _Description):
            return PendingBatch(rank, digests, error=error or description)
        return self._broadcast_tensors(PendingBatch(rank, digests, description), tensors, rank)

    def _broadcast_description(
        self, description: _Description | Exception | None, digest: int, rank: int
    ) -> tuple[list[int], Any]:
        """Returns the digests of all ranks and the description of one, whose length is gathered with the digests."""
        written = bytearray(b"" if description is None else pickle.dumps(description))
        own = torch.tensor([digest, len(written)])
        everyone = [torch.empty_like(own) for _ in self.axis.ranks]
        dist.all_gather(everyone, own, group=self._messages.group)
        length = max(int(theirs[1]) for theirs in everyone)
        text = torch.frombuffer(written, dtype=torch.uint8) if written else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(text, rank, group=self._messages.group)
        received = pickle.loads(text.numpy().tobytes()) if description is None else description
        return [int(theirs[0]) for theirs in everyone], received

    def _broadcast_tensors(self, batch: PendingBatch, tensors: list[Tensor], rank: int) -> PendingBatch:
        """Sends the tensors where this rank has them, else allocates them and receives."""
        assert batch.description is not None
        for i, spec in enumerate(batch.description.tensors):
            # Not the host under another name: "cpu:0", on which some strategies compute, does not equal "cpu".
            device = self._device if spec.on_device and self._stream is not None else torch.device("cpu")
            is_there = bool(tensors) and tensors[i].device == device
            batch.tensors.append(tensors[i] if is_there else spec.allocate(device))
        for i, x in enumerate(batch.tensors):
            if x.device.type == "cpu":
                if tensors and x is not tensors[i]:
                    x.copy_(tensors[i])
                work = dist.broadcast(bytes_in_memory(x), rank, group=self._messages.group, async_op=True)
                assert work is not None
                batch.works.append(work)
        if self._stream is not None:
            self._broadcast_on_device(batch, tensors, rank, self._stream)
        return batch

    def _broadcast_on_device(
        self, batch: PendingBatch, tensors: list[Tensor], rank: int, stream: torch.cuda.Stream
    ) -> None:
        """Sends the tensors that shall arrive on the device, beside what it computes.

        They are allocated on the stream that computes, and waited for by it, so that it may use their memory again as
        soon as they are let go. Were their memory another stream's (``record_stream``), they could not be let go in
        another process: a DataLoader's worker that collects garbage with such a tensor aborts
        (pytorch/pytorch#50200).
        """
        batch.allocated_on = torch.cuda.current_stream(self._device)
        stream.wait_stream(batch.allocated_on)  # which computes them, or still reads what lay in their memory before
        with torch.cuda.stream(stream):
            for i, x in enumerate(batch.tensors):
                if x.is_cuda:
                    if tensors and x is not tensors[i]:
                        x.copy_(_pinned(tensors[i]), non_blocking=True)
                    dist.broadcast(bytes_in_memory(x), rank, group=self._transfers.group)
        batch.arrival = stream.record_event()
        # A batch that nobody waits for must not be let go while it arrives.
        self._coming = [*(other for other in self._coming if other.is_coming), batch]


@dataclass
class PendingBatch:
    """A batch on its way.

    Attributes:
        source: Global rank that sent it.
        digests: Of what each rank expected.
        description: What it is made of; None if there is no batch.
        error: Why there is none: the source's error, or a ``StopIteration``.
        tensors: The batch's tensors, complete once it has arrived.
        works: Transfers to wait for.
        arrival: When what comes to the device is there.
        allocated_on: The stream that may use the memory of what comes to the device again.
    """

    source: int
    digests: list[int]
    description: _Description | None = None
    error: Exception | None = None
    tensors: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    arrival: torch.cuda.Event | None = None
    allocated_on: torch.cuda.Stream | None = None

    @property
    def is_coming(self) -> bool:
        """Whether it may still arrive on the device, and nobody has waited for it."""
        return bool(self.tensors) and self.arrival is not None and not self.arrival.query()

    @property
    def is_end(self) -> bool:
        """Whether the source has no more batches."""
        return isinstance(self.error, StopIteration)

    def wait(self) -> Any:
        """Returns the batch, on this rank, once; the host waits for host memory only, the device for the device.

        Raises:
            Exception: The source's error, if it could not produce the batch.
        """
        if self.description is None:
            assert self.error is not None
            raise self.error
        for work in self.works:
            work.wait()
        tensors, self.tensors = self.tensors, []
        if self.arrival is not None:
            assert self.allocated_on is not None
            stream = torch.cuda.current_stream(self.allocated_on.device)
            stream.wait_event(self.arrival)
            if stream != self.allocated_on:
                for x in tensors:
                    if x.is_cuda:
                        x.record_stream(stream)  # or its memory might be used again before this stream has read it
        return _Unpickler(io.BytesIO(self.description.structure), tensors).load()


class _TensorSpec(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _Description(NamedTuple):
    """A batch without the contents of its tensors."""

    structure: bytes
    tensors: list[_TensorSpec]


class _Pickler(pickle.Pickler):
    """Keeps tensors out of the pickle: they are sent by themselves."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided:
            return None
        self.tensors.append(_dense(obj.detach()))
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _describe(
    produce: Callable[[], Any], to_device: bool
) -> tuple[_Description | Exception, list[Tensor], Exception | None]:
    """Returns the message for all ranks, the tensors that follow it, and this rank's error where there is one."""
    try:
        structure, tensors = pickle_without_tensors(produce())
    except StopIteration:
        end = StopIteration()  # without the frames that led there, which would keep each other and the last batch alive
        return end, [], end
    except Exception as error:
        return _portable(error), [], error
    specs = [_TensorSpec(x.shape, x.stride(), x.dtype, to_device or x.is_cuda) for x in tensors]
    return _Description(structure, specs), tensors, None


def pickle_without_tensors(batch: Any) -> tuple[bytes, list[Tensor]]:
    """Returns a batch's pickle without its tensors, and these, which fill their memory without gaps."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    return file.getvalue(), pickler.tensors


def _portable(error: Exception) -> Exception:
    """An error that other processes can receive: itself, or its text if it cannot be pickled both ways."""
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, type(error)):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _dense(x: Tensor) -> Tensor:
    """The tensor if its elements fill its memory without gaps, in any order (channels_last), else a copy that does.

    A copy has its dims in memory in the order that they had, and one of repeated elements is contiguous.
    """
    x = x.resolve_conj().resolve_neg()
    strides = x.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides, x.shape, strict=True)):
        return x.contiguous()
    outermost_first = sorted(range(x.ndim), key=strides.__getitem__, reverse=True)
    back = [outermost_first.index(dim) for dim in range(x.ndim)]
    return x.permute(outermost_first).contiguous().permute(back)


def _pinned(x: Tensor) -> Tensor:
    """The tensor, in page-locked memory if on the host: else the host would wait for all that the stream waits for."""
    return x if x.is_cuda or x.is_pinned() else x.pin_memory()


def bytes_in_memory(x: Tensor) -> Tensor:
    """The bytes of a tensor without gaps, in the order of its memory: what every backend can send."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
