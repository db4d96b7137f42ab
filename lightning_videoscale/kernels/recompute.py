"""Norm outputs that are computed again in backward rather than kept for it.

Whatever reads a norm's output keeps it: a Linear its input, attention its queries and keys. Yet it is one launch away
from the norm's own input, which is kept anyway. `run_norm` and `recomputed`, one around the norm and one around what
reads it, keep the recipe in its place::

    y = run_norm(norm_modulate, x, scale, shift, recompute=True)
    with recomputed(y, partial(norm_modulate, x, scale, shift), recompute=True):
        z = linear(y)

In a compiled function it is the first that counts: a checkpoint around the norm alone tells the partitioner not to keep
its outputs. In eager code it is the second, through autograd's hooks on saved tensors. Gradients are the same to the
bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.compat.torch.autograd import saved_tensors_pack_hook, version_of

_NormOutputs = Tensor | Sequence[Tensor]


def run_norm(norm: Callable[..., Any], /, *arguments: Any, recompute: bool, **settings: Any) -> Any:
    """Returns ``norm(*arguments, **settings)``, which inside a compiled function is not kept with ``recompute``."""
    if recompute and torch.compiler.is_compiling():
        return checkpoint(norm, *arguments, use_reentrant=False, preserve_rng_state=False, **settings)
    return norm(*arguments, **settings)


def recomputed(
    outputs: _NormOutputs, recipe: Callable[[], _NormOutputs], *, recompute: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Returns a context: what eager code saves for backward inside, and is an output or a view of it, is recomputed.

    It does nothing in a compiled function, and nothing inside other hooks on saved tensors, since those (activation
    checkpointing, offloading) already have their own way with everything that is saved.

    Args:
        outputs: What a norm returned, one tensor or several. The caller must drop them for their memory to be free.
        recipe: Returns all of them again, to the bit; called without gradients, once for all that uses it in a
            backward. It keeps its inputs alive and sees them as they are then, hence they must not be written in place
            meanwhile.
        recompute: False for a context that does nothing.
    """
    if not recompute or torch.compiler.is_compiling() or _inside_other_hooks():
        return contextlib.nullcontext()
    listed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return _hooked(listed, _Recipe(recipe))


class _View(NamedTuple):
    """What a saved view of an output becomes."""

    recipe: _Recipe
    which: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def restore(self) -> Tensor:
        return self.recipe.take(self.which).as_strided(self.shape, self.stride, self.offset)


class _Recipe:
    """Computes the outputs again, when the first of their saved views is used, and drops them with the last."""

    def __init__(self, compute: Callable[[], _NormOutputs]) -> None:
        self._compute = compute
        self._outputs: Sequence[Tensor] | None = None
        self._views = self._unused = 0

    def view(self, which: int, saved: Tensor) -> _View:
        self._views += 1
        self._unused = self._views
        return _View(self, which, saved.shape, saved.stride(), saved.storage_offset())

    def take(self, which: int) -> Tensor:
        if self._outputs is None:
            with torch.no_grad():
                outputs = self._compute()
            self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        taken = self._outputs[which]
        self._unused -= 1
        if not self._unused:
            self._outputs, self._unused = None, self._views
        return taken


class _Pack:
    """The hook on what is saved. It outlives the context, hence it holds no output."""

    def __init__(self, outputs: Sequence[Tensor], recipe: _Recipe, around: Callable[[Tensor], Any] | None) -> None:
        self._which = {(y.untyped_storage().data_ptr(), y.dtype): (i, version_of(y)) for i, y in enumerate(outputs)}
        self._recipe, self._around = recipe, around

    def __call__(self, saved: Tensor) -> Any:
        known = self._which.get((saved.untyped_storage().data_ptr(), saved.dtype)) if saved.numel() else None
        if known is not None and known[1] == version_of(saved):  # else somebody has written into it since
            return self._recipe.view(known[0], saved)
        return saved if self._around is None else self._around(saved)


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.restore() if isinstance(packed, _View) else packed
    return tensor


@contextlib.contextmanager
def _hooked(outputs: Sequence[Tensor], recipe: _Recipe) -> Iterator[None]:
    # Autograd asks the innermost hooks only. This frame holds the outputs, so that no other tensor gets their address.
    with torch.autograd.graph.saved_tensors_hooks(_Pack(outputs, recipe, saved_tensors_pack_hook()), _unpack):
        yield


def _inside_other_hooks() -> bool:
    pack = saved_tensors_pack_hook()
    return pack is not None and not isinstance(pack, _Pack)
