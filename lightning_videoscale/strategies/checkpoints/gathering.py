"""A parameter of which this rank may hold a share, made whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.deepspeed import is_partitioned
from lightning_videoscale.strategies.checkpoints.zero_partitions import gather
from lightning_videoscale.trained_weights import sharded_like


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether each rank holds a share of the parameter: of FSDP2, or of ZeRO-3."""
    return isinstance(parameter, DTensor) or is_partitioned(parameter)


def gather_parameter(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """Returns a parameter whole, on a device where ranks can talk; collective over those that share it."""
    if not isinstance(parameter, DTensor):
        return gather(parameter)
    return sharded_like(parameter, parameter.to_local().detach().to(device)).full_tensor()
