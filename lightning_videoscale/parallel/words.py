"""Numbers put in another order by words of 16 bytes, as which a GPU copies them faster than one by one.

`by_words`       what `torch.cat` and its like return
`copy_by_words`  a copy into memory that is there
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_WORD = torch.complex128
_BYTES = 16
_LEAST_BYTES = 2**20  # of less, a GPU's time is not worth the host's


def by_words(move: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Returns ``move(tensors)``, computed on views of the tensors as words where that is worth it.

    Such views are not made where rows of the last dim are no whole words, dtypes differ, or a gradient is wanted; of
    little memory, since it takes the host longer; and in compiled code, which makes copies of its own.

    Args:
        move: Only copies, such as `torch.cat`. Neighbours in the last dim stay neighbours in the last dim.
        tensors: What it is given.
    """
    words = _as_words(tensors)
    return move(tensors) if words is None else move(words).view(tensors[0].dtype)


def copy_by_words(target: Tensor, source: Tensor) -> None:
    """As ``target.copy_(source)`` of one shape; by words as in `by_words`."""
    target, source = _as_words([target, source]) or (target, source)
    target.copy_(source)


def _as_words(tensors: list[Tensor]) -> list[Tensor] | None:
    if torch.compiler.is_compiling():
        return None
    first = tensors[0]
    if first.nbytes < _LEAST_BYTES or first.shape[-1] * first.itemsize % _BYTES:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None  # a view as another dtype has no gradient, and says nothing
    try:
        if any(x.data_ptr() % _BYTES or x.dtype is not first.dtype for x in tensors):
            return None
        return [x.view(_WORD) for x in tensors]
    except RuntimeError:  # strides are no whole words, or there is no memory, as of fake tensors
        return None
