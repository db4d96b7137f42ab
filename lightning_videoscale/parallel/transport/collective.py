"""Transport over PyTorch's collectives: gloo on CPU, NCCL on GPUs, traceable by `torch.compile`.

Traced, they are functional collectives; run eagerly those take the host about twice as long as plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.compat.torch.distributed import run_all_to_all, traceable_all_to_all, traceable_wait
from lightning_videoscale.compat.torch.versions import all_gather_single
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport.columns import CopiedColumns

Join = Callable[[Sequence[Tensor]], Tensor]
"""Makes the result of an exchange of its pieces, 1-D, in the order of their senders; they are not to be kept."""


class _PendingWork(NamedTuple):
    work: dist.Work
    received: Tensor
    sizes: Sequence[int]


class CollectiveExchange:
    """A message that is sent with the last of its pieces; see `Exchange`."""

    def __init__(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> None:
        self.pieces = message.split(list(send))
        self._message = message
        self._sizes = send, receive
        self._axis = axis
        self._lacking = set(range(axis.size))
        self._pending: _PendingWork | None = None

    def send(self, *peers: int) -> None:
        """Starts the collective once nothing is lacking.

        Raises:
            ValueError: If a piece was sent already; nothing is sent then.
        """
        if again := sorted(set(peers) - self._lacking):
            raise ValueError(f"The pieces for the positions {again} of the {self._axis.name} axis were sent.")
        self._lacking.difference_update(peers)
        if not self._lacking:
            self._pending = _started(self._message, *self._sizes, self._axis)

    @property
    def pending(self) -> _PendingWork:
        """The collective.

        Raises:
            RuntimeError: If a piece was not sent.
        """
        if self._pending is None:
            lacking = sorted(self._lacking)
            raise RuntimeError(f"Nothing was sent to the positions {lacking} of the {self._axis.name} axis.")
        return self._pending


class CollectiveTransport:
    """See `Transport` for the contract."""

    name = "collective"
    traceable = True

    @property
    def memory_bytes(self) -> int:
        """None: what gloo and NCCL take is not known."""
        return 0

    @property
    def places(self) -> Hashable:
        """None that anybody need hold: a graph of CUDA has what its collectives take."""
        return ()

    @property
    def failure(self) -> str | None:
        """None: a collective that fails raises."""
        return None

    def carrier(self, axis: Axis) -> str:
        """Its own name."""
        return self.name

    def close(self) -> None:
        """Does nothing: the groups are the mesh's."""

    def reset(self) -> None:
        """Does nothing: no state is kept between messages. A collective that some ranks began alone is not ended."""

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """As ``all_to_all_single`` without its checks; NCCL runs it on the current stream, which spares two events."""
        if torch.compiler.is_compiling():
            return self.wait(self.all_to_all(message, send, receive, axis))
        received = message.new_empty(sum(receive))
        run_all_to_all(received, message, *_sizes(send, receive), axis.group)
        return received

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Starts ``all_to_all_single`` (NCCL: on a stream of its own)."""
        if torch.compiler.is_compiling():
            return traceable_all_to_all(message, receive, send, axis.group)
        return _started(message, send, receive, axis)

    def wait(self, pending: Any, join: Join | None = None) -> Tensor:
        """Waits for the collective (on GPUs: makes the current stream wait, not the host); traced, without ``join``."""
        if isinstance(pending, CollectiveExchange):
            pending = pending.pending
        if isinstance(pending, _PendingWork):
            pending.work.wait()
            return pending.received if join is None else join(pending.received.split(list(pending.sizes)))
        return traceable_wait(pending)

    def open(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """See `Transport`; not traceable."""
        return CollectiveExchange(message, send, receive, axis)

    def begin(self, like: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """See `Transport`; this rank's own piece is sent by the collective, too."""
        return self.open(like.new_empty(sum(send)), send, receive, axis)

    def begin_columns(self, columns: Tensor, lengths: Sequence[int], widths: Sequence[int], axis: Axis) -> Any:
        """See `Transport`; not traceable."""
        return CopiedColumns(self, columns, lengths, widths, axis)

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """All-gathers along dim 0; uneven shards are padded to the longest."""
        longest = max(lengths)
        # The collective moves equal shards only; a variable-size gather would be one broadcast per rank.
        padded = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])]) if x.shape[0] < longest else x
        gathered = padded.new_empty(longest * axis.size, *x.shape[1:])
        all_gather_single(gathered, padded.contiguous(), axis.group)
        if min(lengths) == longest:
            return gathered
        shards = gathered.split(longest)
        return torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)])


def _started(message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> _PendingWork:
    received = message.new_empty(sum(receive))
    of_received, of_message = _sizes(send, receive)
    work = dist.all_to_all_single(received, message, of_received, of_message, axis.group, async_op=True)
    return _PendingWork(work, received, receive)


def _sizes(send: Sequence[int], receive: Sequence[int]) -> tuple[list[int], list[int]]:
    """What ``all_to_all_single`` takes for received and sent pieces; none if all are equal, which is checked sooner."""
    if len({*send, *receive}) == 1:
        return [], []
    return list(receive), list(send)
