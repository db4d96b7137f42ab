"""One batch for all ranks of a sequence-parallel group."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_videoscale.parallel import Axis

_Batch = TypeVar("_Batch")


class _TensorSpec(NamedTuple):
    """Stands for a tensor in the description of a batch."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str


def broadcast_batch(batch: _Batch, axis: Axis, device: torch.device) -> _Batch:
    """Returns the batch of the axis's first rank, on every rank of the axis; collective over the axis.

    Args:
        batch: Any nesting of dicts, lists and tuples of tensors and picklable objects.
        axis: The ranks that share.
        device: This rank's device, through which tensors travel; a tensor that lay on the CPU returns there.
    """
    if axis.size == 1:
        return batch
    tensors: list[Tensor] = []

    def describe(x: Tensor) -> _TensorSpec:
        tensors.append(x)
        return _TensorSpec(x.shape, x.dtype, x.device.type)

    def allocate(spec: _TensorSpec) -> Tensor:
        tensors.append(torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if spec.device_type == "cpu" else device))
        return tensors[-1]

    first = axis.rank == 0
    description: list[Any] = [apply_to_collection(batch, Tensor, describe) if first else None]
    dist.broadcast_object_list(description, axis.ranks[0], group=axis.group, device=device)
    shared: _Batch = batch if first else apply_to_collection(description[0], _TensorSpec, allocate)
    for x in tensors:
        travelling = x.to(device).contiguous()
        dist.broadcast(travelling, axis.ranks[0], group=axis.group)
        if not first and travelling is not x:
            x.copy_(travelling)
    return shared
