"""What differs between the versions of torch that we support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gathers equal shards along dim 0. torch 2.13 renamed it and warns at the old name."""


def mix_order_reduction_is_wrong() -> bool:
    """Whether this torch returns wrong or failing gradients of scale and shift in compiled AdaLN (pytorch #193061)."""
    return Version("2.10") <= _installed() < Version("2.12")


def autocast_widens_norms() -> bool:
    """Whether autocast runs ``rms_norm`` in float32 on CUDA, as from torch 2.12 on."""
    return _installed().release >= (2, 12)


def ring_attention_is_traced() -> bool:
    """Whether compiled code has the right gradients of an autograd function whose backward fills tensors in place.

    Those of ring attention are zero in torch 2.11, on CPUs and GPUs, and right in 2.13; 2.12 was not tried.
    """
    return _installed().release >= (2, 13)


def _installed() -> Version:
    return Version(torch.__version__.split("+")[0])
