"""Replays a captured pass as part of autograd: `replay`.

Forward is one graph. Backward is a chain of autograd functions, one for each segment, tied by empty tensors. Each
returns the gradients of its parameters, so that whatever waits for them (DDP's buckets, hooks, accumulation) goes on
while the next segment's graph runs.

A gradient lies in memory of the pool, so that the engine copies it into a parameter's ``.grad``. DDP copies that again,
into its buckets. Where all gradients are copied by who waits for them, ``.grad`` is lent the memory of the pool. What
has not been copied when backward ends, as inside of ``no_sync``, is copied then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_videoscale.compat.torch.autograd import (
    adds_to_gradient,
    has_hooks,
    has_hooks_on_grad,
    when_backward_ends,
)
from lightning_videoscale.compat.torch.trees import tree_unflatten
from lightning_videoscale.graphs.capture import CapturedPass, Segment


class Tenancy:
    """Whose activations lie in the pool: those of one pass at a time, until its backward is over or it is let go."""

    def __init__(self) -> None:
        self._tenant: weakref.ref[Replay] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a pass may still go backward."""
        run = None if self._tenant is None else self._tenant()
        return run is not None and not run.is_over

    def follow(self) -> None:
        """Has this stream wait for the one of the pass before, which may still read what the next one overwrites."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def take(self, run: Replay) -> None:
        """Gives the pool to a pass."""
        self._tenant = weakref.ref(run)

    def is_held_by(self, run: Replay) -> bool:
        """Whether nothing has taken the pool since."""
        return self._tenant is not None and self._tenant() is run


class Replay:
    """One replay of a pass; lives as long as something may go backward through it."""

    def __init__(self, captured: CapturedPass, tenancy: Tenancy, lends: bool) -> None:
        self.captured, self._tenancy, self._lends = captured, tenancy, lends
        self.is_over = False
        self.last = captured.last
        self._next = 0  # segment of backward
        tenancy.take(self)

    def outputs(self) -> list[Any]:
        """The leaves of what the network returns, in memory of their own."""
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.captured.outputs]

    def backward(self, number: int) -> list[Tensor]:
        """Runs a segment of backward and returns the gradients that its parameters are to have."""
        self._run(number)
        segment = self.captured.segments[number]
        are_returned = bool(segment.parameters) and not adds_to_gradient(segment.parameters[0])
        if are_returned or any(map(has_hooks, segment.parameters)):  # who takes them, may keep them
            return [gradient.clone() for gradient in segment.gradients]
        if not self._lends or any(map(has_hooks_on_grad, segment.parameters)):
            return segment.gradients
        when_backward_ends(partial(_take_back, segment))
        return [gradient.detach() for gradient in segment.gradients]  # which nobody else holds, so that none is copied

    def _run(self, number: int) -> None:
        if self.captured.is_gone:
            raise RuntimeError(
                "A pass that ran by a CUDA graph goes backward after the run in which it was computed has ended, and "
                "its graphs with it. Go backward inside the run, or take graphs=False."
            )
        if self.is_over or number != self._next or not self._tenancy.is_held_by(self):
            raise RuntimeError(
                "A pass that ran by a CUDA graph goes backward once, since its activations are overwritten meanwhile, "
                "also where only some gradients are asked for. Add the losses up and go backward once, or take "
                "graphs=False."
            )
        self._next += 1
        self.captured.segments[number].graph.replay()
        self.is_over = number == self.last


def _take_back(segment: Segment) -> None:
    """Gives parameters whose gradients still lie in the pool memory of their own."""
    for parameter, lent in zip(segment.parameters, segment.gradients, strict=True):
        if parameter.grad is not None and parameter.grad.data_ptr() == lent.data_ptr():
            parameter.grad = parameter.grad.clone()


def replay(captured: CapturedPass, tensors: Sequence[Tensor], tenancy: Tenancy, lends: bool = False) -> Any:
    """Computes a pass by its graphs.

    Args:
        captured: The pass.
        tensors: Of its arguments.
        tenancy: Of the pool.
        lends: Whether gradients are copied by who waits for them; see the module.

    Returns:
        What the network returns.
    """
    if tensors[0].is_cuda:
        tenancy.follow()
    for static, x in zip(captured.inputs, tensors, strict=True):
        static.copy_(x.detach())
    run = Replay(captured, tenancy, lends)
    captured.forward.replay()
    if not captured.segments:
        run.is_over = True
        return tree_unflatten(run.outputs(), captured.structure)
    tie = tensors[0].new_empty(0, dtype=torch.float32)
    inputs = [x for x, gradient in zip(tensors, captured.input_gradients, strict=True) if gradient is not None]
    for number in reversed(range(len(captured.segments))):  # those that run last in backward come first
        tie = _tie(run, number, tie, inputs if number == run.last else [])
    leaves = iter(_Outputs.apply(run, tie))  # type: ignore[no-untyped-call]
    outputs = [next(leaves) if isinstance(leaf, Tensor) else leaf for leaf in captured.outputs]
    return tree_unflatten(outputs, captured.structure)


def _tie(run: Replay, number: int, tie: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    parameters = run.captured.segments[number].parameters
    tied: Tensor = _Segment.apply(run, number, tie, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return tied


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Replay, number: int, tie: Tensor, *_: Tensor) -> Tensor:
        ctx.run, ctx.number, ctx.returns = run, number, "whole"
        return torch.empty_like(tie)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tie: Tensor) -> tuple[Any, ...]:
        run: Replay = ctx.run
        gradients = run.backward(ctx.number)
        of_inputs = [x.clone() for x in run.captured.input_gradients if x is not None] if ctx.number == run.last else []
        return None, None, tie, *of_inputs, *gradients


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Replay, tie: Tensor) -> tuple[Tensor, ...]:
        # `auxiliary_loss.check_loss` looks for it: a network's output is the same on all ranks that share a sequence.
        ctx.run, ctx.tie, ctx.returns = run, tie.detach(), "whole"
        ctx.set_materialize_grads(False)
        outputs = tuple(leaf for leaf in run.outputs() if isinstance(leaf, Tensor))
        places = _places(run.captured)
        ctx.mark_non_differentiable(*(x for x, place in zip(outputs, places, strict=True) if place is None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        for place, gradient in zip(_places(ctx.run.captured), gradients, strict=True):
            if place is not None:
                place.zero_() if gradient is None else place.copy_(gradient)
        return None, ctx.tie


def _places(captured: CapturedPass) -> list[Tensor | None]:
    """Where the gradients of the output's tensors go, if they have any."""
    return [
        place
        for leaf, place in zip(captured.outputs, captured.output_gradients, strict=True)
        if isinstance(leaf, Tensor)
    ]
