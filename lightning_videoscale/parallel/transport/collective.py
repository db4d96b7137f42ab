"""Transport over PyTorch's functional collectives: gloo on CPU, NCCL on GPUs, traceable by `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from lightning_videoscale.parallel.mesh import Axis

# torch 2.13 renamed it and warns at the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveTransport:
    """See `Transport` for the contract."""

    name = "collective"

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Starts ``all_to_all_single``."""
        pending: Tensor = functional.all_to_all_single(message, list(receive), list(send), axis.group)
        return pending

    def wait(self, pending: Tensor) -> Tensor:
        """Waits for the collective (on GPUs: makes the current stream wait, not the host)."""
        finished: Tensor = functional.wait_tensor(pending)
        return finished

    def all_gather(self, x: Tensor, lengths: Sequence[int], axis: Axis) -> Tensor:
        """All-gathers along dim 0; uneven shards travel padded to the longest."""
        longest = max(lengths)
        # The collective moves equal shards only; a variable-size gather would be one broadcast per rank.
        padded = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])]) if x.shape[0] < longest else x
        gathered = padded.new_empty(longest * axis.size, *x.shape[1:])
        _all_gather_single(gathered, padded.contiguous(), axis.group)
        if min(lengths) == longest:
            return gathered
        shards = gathered.split(longest)
        return torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)])
