"""Masks of keys, as kernels can take them."""

from __future__ import annotations

import torch
from torch import Tensor

_HIDES = -1e3
"""A bias of this or less takes a key out: diffusers has -10 000, others the least number of a dtype."""


def visible(mask: Tensor) -> Tensor:
    """Returns where a mask, which torch's function takes as bool or as a bias, lets a key be attended."""
    return mask if mask.dtype is torch.bool else mask > _HIDES


def is_biased(mask: Tensor) -> Tensor:
    """Returns whether a bias says more than which keys may be attended, as a tensor () for which nobody waits."""
    return ((mask != 0) & ~(mask <= _HIDES)).any()


def open_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Opens the samples of a mask (B, K) of which no key may be attended, which kernels answer with NaN.

    Returns:
        The mask with those samples wholly True, and (B,) bool that is True for them: their results are to be zeroed.
    """
    empty = ~mask.any(1)
    return mask | empty[:, None], empty


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a bias (B, 1, 1, K) of 0 where a mask (B, K) is True and -inf elsewhere; None without a mask."""
    if mask is None:
        return None
    # A row that starts on 16 elements, as the efficient kernel wants to read it.
    keys = mask.shape[1]
    row = torch.zeros(mask.shape[0], -(-keys // 16) * 16, dtype=dtype, device=mask.device)[:, :keys]
    return row.masked_fill_(~mask, -torch.inf)[:, None, None]
