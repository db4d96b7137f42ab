"""Norm outputs that are computed again in backward rather than kept for it.

A Linear keeps its input. Behind a norm that input is one launch away from x, which is kept anyway: `recomputed` lets
whatever runs inside it keep the recipe in its place. In eager code it works through autograd's hooks on saved tensors;
inside a compiled function the partitioner is told instead, by a checkpoint around the norm alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def recomputed(y: Tensor, recipe: Callable[[], Tensor]) -> Iterator[None]:
    """Whatever is saved for backward inside, and is y or a view of it, is computed again in backward.

    For eager code; in a compiled function use `recomputed_in_graph`. y itself must be dropped by the caller for its
    memory to be free.

    Args:
        y: A norm's output, contiguous.
        recipe: Returns y again, to the bit; called without gradients, once for all that is saved and still in use. It
            keeps its inputs alive and sees them as they are then, hence they must not be written in place meanwhile.
    """
    # `pack` outlives this context and must not hold y; until it ends, y itself keeps its address from being reused.
    storage, dtype, again = y.untyped_storage().data_ptr(), y.dtype, _Recipe(recipe)

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.numel() and saved.untyped_storage().data_ptr() == storage and saved.dtype == dtype:
            return _View(again, saved.shape, saved.stride(), saved.storage_offset())
        return saved

    def unpack(packed: Tensor | _View) -> Tensor:
        return packed.restore() if isinstance(packed, _View) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def recomputed_in_graph(norm: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Calls ``norm(*arguments, **settings)`` inside a compiled function so that its outputs are not kept for backward.

    The partitioner of `torch.compile` would keep them, as it does the output of every op it does not know.
    """
    return checkpoint(norm, *arguments, use_reentrant=False, preserve_rng_state=False, **settings)


class _Recipe:
    """Computes a tensor again, once for all that use it at a time."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._latest: weakref.ref[Tensor] | None = None

    def __call__(self) -> Tensor:
        tensor = self._latest() if self._latest is not None else None
        if tensor is None:
            with torch.no_grad():
                tensor = self._compute()
            self._latest = weakref.ref(tensor)
        return tensor


class _View(NamedTuple):
    """What a saved view of y becomes."""

    recipe: _Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def restore(self) -> Tensor:
        return self.recipe().as_strided(self.shape, self.stride, self.offset)
