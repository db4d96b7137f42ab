"""The residual stream of a block: branches leave it by a norm and come back by a gate, and neighbours are one kernel.

With it a fused forward says which modules the branches are, which norm and which modulation belong to each, and in
what order they run::

    stream = ResidualStream(self, hidden_states, rounding="eager")
    stream.branch(self.attn, self.norm1, attention)
    stream.branch(self.ff, self.norm2, feed_forward)
    return stream.end()

That is ``fork_norm_modulate`` in front, ``gate_residual_norm_modulate`` where one branch ends and the next begins, and
``gate_residual`` behind the last. Norm outputs are computed again in backward where the block says so, and the bias
gradients of the branches' last Linears are summed in the same backward kernels.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.modulation import Modulation
from lightning_videoscale.injection.norms import of_norm
from lightning_videoscale.kernels import (
    fork_norm_modulate,
    gate_residual,
    gate_residual_norm_modulate,
    norm_modulate,
)
from lightning_videoscale.kernels.autograd import under_autocast
from lightning_videoscale.kernels.recompute import recomputed, run_norm
from lightning_videoscale.kernels.row_types import Rounding


class _PendingBranch(NamedTuple):
    """A branch that is not yet added."""

    branch: Tensor
    modulation: Modulation | None
    bias: Tensor | None

    @property
    def gate(self) -> dict[str, Any]:
        modulation = self.modulation
        of_gate = {} if modulation is None or modulation.gate is None else modulation.of_gate()
        return of_gate | {"branch_bias": self.bias}


class ResidualStream:
    """One residual stream, (B, S, D), from a block's entry to its end.

    With "eager", everything is rounded where eager code rounds, and the stream becomes as wide as what is added to it.
    Under autocast, where eager code computes norms in float32, each output is rounded once.

    Args:
        block: The fused block, which says what runs its kernels.
        x: The stream where the block begins.
        rounding: As the kernels have it: "fp32_once" or "eager".
    """

    def __init__(self, block: Any, x: Tensor, rounding: Rounding) -> None:
        self._h = x
        self._pending: _PendingBranch | None = None
        self._recipe: Any = None
        self._widens, self._recompute = rounding == "eager", block.recompute_norms
        once = self._widens and under_autocast(x)
        self._settings = {"rounding": "fp32_once" if once else rounding, "backend": block.kernel_backend}

    def branch(
        self,
        module: Any,
        norm: Any,
        modulation: Modulation | None,
        *args: Any,
        by_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Runs a branch: a norm, a module, a gate.

        Args:
            module: Is called with what the norm returns, and returns a tensor of the same shape.
            norm: Of one of the kinds of `norms`; None for a branch that reads the stream as it is.
            modulation: Of the norm and the gate; None for neither.
            *args: Further arguments of the module.
            by_name: How the first argument is called where the model gives it by name, as hooks see it.
            **kwargs: Likewise.
        """

        def call(y: Tensor) -> tuple[Any, Tensor | None]:
            if by_name is None:
                return branch_and_bias(module, y, *args, **kwargs)
            return branch_and_bias(module, *args, **{by_name: y}, **kwargs)

        if norm is None:
            output, bias = call(self.end())
        else:
            y = self.norm(norm, modulation)
            with self.recomputed(y):
                output, bias = call(y)
        self.add(output, modulation, bias)

    def norm(self, norm: Any, modulation: Modulation | None = None) -> Tensor:
        """What a branch reads: the stream, normalised and modulated."""
        arguments = of_norm(norm) | self._settings
        if modulation is not None:
            arguments |= modulation.of_norm()
        pending = self._pending
        if pending is not None and not _at_once(pending.modulation, modulation, norm.eps):
            self.end()
            pending = None
        h = _for_timesteps(self._widened(pending, modulation), modulation)
        if pending is None:
            h, y = run_norm(fork_norm_modulate, h, **arguments, recompute=self._recompute)
        else:
            both = pending.gate | arguments
            h, y = run_norm(gate_residual_norm_modulate, h, pending.branch, **both, recompute=self._recompute)
        self._h, self._pending = h, None
        self._recipe = partial(norm_modulate, h, **arguments)
        normed: Tensor = y
        return normed

    def behind(self, branch: Tensor, norm: Any) -> Tensor:
        """What a RMSNorm behind a branch, in front of its gate, makes of it."""
        if norm.weight is not None:  # of a branch that autocast made, eager code returns the weight's dtype
            branch = branch.to(torch.promote_types(branch.dtype, norm.weight.dtype))
        normed: Tensor = norm_modulate(branch, **of_norm(norm), **self._settings)
        return normed

    def recomputed(self, y: Tensor) -> contextlib.AbstractContextManager[None]:
        """A context for what reads y, the last norm's output: see `lightning_videoscale.kernels.recompute`."""
        return recomputed(y, self._recipe, recompute=self._recompute)

    def add(self, branch: Tensor, modulation: Modulation | None = None, bias: Tensor | None = None) -> None:
        """Takes a branch back, by the modulation's gate; the next norm, branch, or the end, adds it.

        Args:
            branch: (B, S, D).
            modulation: Whose gate is meant, or None.
            bias: That of the Linear which the branch comes from, if it was left detached.
        """
        self.end()
        self._pending = _PendingBranch(branch, modulation, bias)

    def end(self) -> Tensor:
        """The stream as it is now, all branches added."""
        if self._pending is not None:
            h = self._widened(self._pending, None)
            branch, gate = self._pending.branch, self._pending.gate
            if gate.get("gate") is None:
                gate["gate"] = branch.new_ones(()).expand(branch.shape[0], 1, branch.shape[2])
            self._h, self._pending = gate_residual(h, branch, **gate, **self._settings), None
        return self._h

    def _widened(self, pending: _PendingBranch | None, modulation: Modulation | None) -> Tensor:
        """The stream in the dtype that eager code has from here on."""
        if not self._widens:
            return self._h
        dtype = self._h.dtype if pending is None else torch.promote_types(self._h.dtype, pending.branch.dtype)
        for each in (modulation, None if pending is None else pending.modulation):
            if each is not None:
                dtype = torch.promote_types(dtype, each.dtype)
        return self._h if self._h.dtype is dtype else self._h.to(dtype)


def attend_between(
    attn: Any,
    video: tuple[ResidualStream, Any, Modulation],
    text: tuple[ResidualStream, Any, Modulation],
    *,
    shared: bool = False,
    **named: Any,
) -> None:
    """Runs an attention that is a branch of two streams, each a stream, a norm and a modulation.

    Args:
        attn: Is called with ``hidden_states`` and ``encoder_hidden_states``, and returns a branch of each.
        video: Of the first.
        text: Of the second.
        shared: Whether the Linear at the end of the first branch is that of the second, too.
        **named: Further arguments of the attention.
    """
    y, context = video[0].norm(*video[1:]), text[0].norm(*text[1:])
    with video[0].recomputed(y), text[0].recomputed(context):
        (attended, of_text), bias = branch_and_bias(attn, hidden_states=y, encoder_hidden_states=context, **named)
    video[0].add(attended, video[2], bias)
    text[0].add(of_text, text[2], bias if shared else None)


def _for_timesteps(h: Tensor, modulation: Modulation | None) -> Tensor:
    """The stream; one sample, as of one text for all, becomes as many as there are timesteps, as in eager code."""
    if modulation is None or h.shape[0] != 1:
        return h
    samples = (modulation.scale if modulation.which is None else modulation.which).shape[0]
    return h if samples == 1 else h.expand(samples, -1, -1)


def _at_once(gate: Modulation | None, modulation: Modulation | None, eps: float) -> bool:
    """Whether one kernel takes both: the gate of the branch before, and the norm, scale and shift of the one behind."""
    if gate is None or gate.gate is None:
        return True
    if gate.normed_eps not in (None, eps):
        return False
    if modulation is None:
        return True
    mine, theirs = gate.gate, modulation.scale
    return gate.which is modulation.which and mine.shape == theirs.shape and mine.dtype is theirs.dtype
