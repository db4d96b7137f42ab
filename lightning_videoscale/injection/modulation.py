"""Shift, scale and gate of a timestep's part and a block's own, and timesteps of which many are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GroupedModulation(NamedTuple):
    """The timestep's part of the modulation for tokens of which many have the same timestep.

    Attributes:
        values: (U, 6·D) or (U, 6, D), an entry for each different timestep.
        which: (B, S) integers: which entry each token has.
    """

    values: Tensor
    which: Tensor

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> GroupedModulation:
        """Splits the channels, the last dimension of what this stands for, as diffusers' model does before its blocks.

        Raises:
            ValueError: If ``dim`` is not that dimension.
        """
        if dim not in (-1, 2):
            raise ValueError(f"Only the channels, dimension 2 of (B, S, 6·D), can be split; got dimension {dim}.")
        return GroupedModulation(self.values.unflatten(1, sizes), self.which)

    def per_token(self) -> Tensor:
        """What this stands for, (B, S, …)."""
        return self.values[self.which]


class Modulation(NamedTuple):
    """Shift, scale and gate of one branch: the timestep's part and the block's own, if there is one.

    Attributes:
        shift: (B, 1 or S, D), or (U, D), of which each token has an entry; or None.
        scale: Likewise, but never None.
        gate: Likewise; None for a branch that is added as it is.
        shift_table: (D,), the block's own part, which is added inside; or None.
        scale_table: Likewise.
        gate_table: Likewise.
        which: (B, S) integers, each token's entry; None where there are no entries.
        normed_eps: Of a branch that passes a RMSNorm without a weight, and then a gate of tanh; None for others.
    """

    shift: Tensor | None
    scale: Tensor
    gate: Tensor | None
    shift_table: Tensor | None = None
    scale_table: Tensor | None = None
    gate_table: Tensor | None = None
    which: Tensor | None = None
    normed_eps: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the two parts' sum."""
        own = self.scale_table
        return self.scale.dtype if own is None else torch.promote_types(self.scale.dtype, own.dtype)

    def of_norm(self) -> dict[str, Any]:
        """What `norm_modulate` takes of it."""
        return {
            "scale": self.scale,
            "shift": self.shift,
            "scale_table": self.scale_table,
            "shift_table": self.shift_table,
            "index": self.which,
        }

    def of_gate(self) -> dict[str, Any]:
        """What `gate_residual` takes of it."""
        taken = {"gate": self.gate, "gate_table": self.gate_table, "index": self.which}
        if self.normed_eps is None:
            return taken
        return taken | {"gate_activation": "tanh", "branch_norm": True, "eps": self.normed_eps}


def for_samples(embedded: Tensor, batch_size: int) -> Tensor:
    """What was made of one timestep, (1, …), for all samples of a stream; of several, as it is.

    Where these are more than the stream's samples, its one sample is that of all of them, see `ResidualStream`.
    """
    return embedded.expand(batch_size, *embedded.shape[1:]) if embedded.shape[0] == 1 else embedded


def modulations(table: Tensor, temb: Tensor | GroupedModulation, batch_size: int) -> tuple[Modulation, ...]:
    """Returns the modulations of n branches, the self-attention's first; nothing is added up here.

    Args:
        table: The block's own part, (1, 3 · n, D) or (3 · n, D).
        temb: The timestep's part: (B, 3 · n, D) per sample or (B, S, 3 · n, D) per token, or grouped; B may be 1 for
            all.
        batch_size: B.
    """
    parts: tuple[Tensor, ...]
    which = None
    if isinstance(temb, GroupedModulation):
        parts, which = temb.values.unbind(dim=1), temb.which
    else:
        per_token = temb.unsqueeze(1) if temb.ndim == 3 else temb
        parts = for_samples(per_token, batch_size).unbind(dim=2)
    own = table.squeeze(0).unbind(0)
    return tuple(_modulation(parts[i : i + 3], own[i : i + 3], which) for i in range(0, len(own), 3))


def per_sample(embedded: Tensor, branches: int, batch_size: int) -> list[Modulation]:
    """Returns the modulations that one Linear made of the timestep.

    Args:
        embedded: (B, n · 3 · D): shift, scale and gate of each branch in turn; or (B, S, n · 3 · D) of each token. B
            may be 1 for all.
        branches: n.
        batch_size: B.
    """
    per_token = embedded.unsqueeze(1) if embedded.ndim == 2 else embedded
    parts = for_samples(per_token, batch_size).chunk(3 * branches, dim=-1)
    return [_modulation(parts[i : i + 3]) for i in range(0, 3 * branches, 3)]


def of_adaptive_norm(norm: Any, temb: Tensor, branches: int, batch_size: int) -> list[Modulation]:
    """Returns the modulations that an adaptive norm of diffusers, with ``silu`` and ``linear``, makes of the timestep.

    Args:
        norm: It; what it normalises by is not called.
        temb: (B, D); B may be 1 for all.
        branches: How many it modulates, each by shift, scale and gate.
        batch_size: B.
    """
    return per_sample(norm.linear(norm.silu(temb)), branches, batch_size)


def of_last_norm(embedded: Tensor, batch_size: int) -> Modulation:
    """Returns the modulation of a norm behind which nothing comes back, as AdaLayerNormContinuous has it.

    Args:
        embedded: (B, 2 · D): scale and shift; B may be 1 for all.
        batch_size: B.
    """
    scale, shift = for_samples(embedded, batch_size).unsqueeze(1).chunk(2, dim=-1)
    return Modulation(shift, scale, None)


def per_segment(
    first: Tensor, others: Tensor, branches: int, batch_size: int, tokens: tuple[int, int]
) -> list[Modulation]:
    """As `per_sample`, for sequences whose first tokens have another timestep than the others.

    Args:
        first: (B, n · 3 · D), of the first tokens.
        others: Of the other tokens, likewise.
        branches: n.
        batch_size: B.
        tokens: How many come first, and how many there are in all.
    """
    entries = torch.cat([for_samples(each, batch_size) for each in (first, others)])
    places = torch.arange(tokens[1], device=first.device)
    parts, which = entries.chunk(3 * branches, dim=-1), one_of_two(places[None] >= tokens[0], entries.shape[0] // 2)
    return [_modulation(parts[i : i + 3], which=which) for i in range(0, 3 * branches, 3)]


def per_index(embedded: Tensor, index: Tensor, branches: int, batch_size: int) -> list[Modulation]:
    """As `per_sample`, for tokens that each say which of two timesteps they have.

    Args:
        embedded: (2 · B, n · 3 · D), of the first timestep and then of the second; B may be 1 for all.
        index: (B, S) integers, B may be 1 for all: 0 for the first timestep, anything else for the second.
        branches: n.
        batch_size: B.
    """
    entries = torch.cat([for_samples(each, batch_size) for each in embedded.chunk(2)])
    parts, which = entries.chunk(3 * branches, dim=-1), one_of_two(index != 0, entries.shape[0] // 2)
    return [_modulation(parts[i : i + 3], which=which) for i in range(0, 3 * branches, 3)]


def one_of_two(second: Tensor, batch_size: int) -> Tensor:
    """Of (B or 1, S) booleans, the entries (B, S) among (2 · B): all samples' first ones and then all second ones."""
    return (torch.arange(batch_size, device=second.device)[:, None] + batch_size * second).int()


def _modulation(
    parts: Sequence[Tensor], tables: Sequence[Tensor | None] = (None,) * 3, which: Tensor | None = None
) -> Modulation:
    (shift, scale, gate), (shift_table, scale_table, gate_table) = parts, tables
    return Modulation(shift, scale, gate, shift_table, scale_table, gate_table, which)


class Repeated(NamedTuple):
    """The different timesteps, (U,), and which one each token has, (B, S)."""

    values: Tensor
    which: Tensor


def find_repeated(timestep: Tensor, tokens: int | None) -> Repeated | None:
    """Returns what repeats in (B·S,) timesteps, or None where fewer than half do.

    None also in compiled code, in CUDA graphs, and where timesteps have gradients, which are of each token.
    How many are different decides over shapes, hence the host waits for the device, once in a forward.
    """
    if tokens is None or timestep.requires_grad or torch.compiler.is_compiling() or _is_captured(timestep):
        return None
    values, which = torch.unique(timestep, return_inverse=True)
    return Repeated(values, which.unflatten(0, (-1, tokens))) if 2 * len(values) <= len(timestep) else None


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
