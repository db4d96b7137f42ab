"""The one entry to attention over a split sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.attention import AttentionBackend, AttentionChoices, as_autocast, as_choices, attention
from lightning_videoscale.attention.dispatch import refuse_modes
from lightning_videoscale.parallel.derivatives import refuse_transforms
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.ring import Ring, ring_attention
from lightning_videoscale.parallel.ring_op import ring_attention_by_op
from lightning_videoscale.parallel.transport import DEFAULT_TRANSPORT, Transport
from lightning_videoscale.parallel.ulysses import (
    HeadAssignment,
    Ulysses,
    assign_heads,
    gather_heads,
    repeat_heads,
    scatter_heads,
)


def sequence_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: SequenceMesh,
    *,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    whole_key_mask: Tensor | None = None,
    transport: Transport | None = None,
    scale: float | None = None,
    attention_backend: AttentionBackend | AttentionChoices = "auto",
    number: int | None = None,
) -> Tensor:
    """Bidirectional attention over a sequence of which every rank of ``mesh.sp`` holds a slice.

    Equal to dense attention over the whole sequence, in value and gradient: Ulysses within a Ulysses group, ring
    attention between the groups, and both together (USP, Fang and Zhao, 2024). Lengths and query heads need not
    divide by anything. Key/value heads may be fewer than query heads (grouped-query attention) and than Ulysses ranks.

    Args:
        query: (B, s, H, D), this rank's s tokens; already normalised and rotated with this rank's positions.
        key: (B, t, h, D), where H is a multiple of h: key/value head i serves query heads i·H/h to (i+1)·H/h - 1.
            In self-attention t is s.
        value: As ``key``.
        mesh: The mesh; its ``ulysses`` and ``ring`` axes are used.
        lengths: Tokens of each rank of ``mesh.sp``, one at least; all ranks hold s tokens if left out.
        key_lengths: As ``lengths``, of another sequence that keys and values are (audio for video, say); that of the
            queries if left out.
        key_mask: (B, t) bool, on all ranks or on none: True for those of this rank's tokens that may be attended.
            Tokens that may not, such as padding, have no influence on others. Where a sample has no token that may be
            attended, the result is zeros.
        whole_key_mask: (B, keys of all ranks) bool, in the place of ``key_mask`` where it is known already: what
            `gather_mask` makes of it. Every sample must have a True, as after `attention.open_mask`.
        transport: What sends messages; collectives if left out.
        scale: Factor on the logits, ``D ** -0.5`` if left out.
        attention_backend: Which kernel computes the attention of each rank: one by name, or ``"auto"``, see
            `AttentionChoices`. By name and for ``"auto"`` all calls of the process share one; to have it measure, make
            one and call its ``settle`` between steps.
        number: Of the `SequenceContext`, which a split model has: in compiled code a ring then runs in one piece, and
            so does an exchange over a transport that cannot be traced. Left out, a ring is traced, and such a transport
            is an error in compiled code.

    Returns:
        (B, s, H, D): attention output for this rank's tokens.

    Raises:
        ValueError: If there are fewer query heads than Ulysses ranks, the shapes fit neither each other nor the
            lengths, a rank has no token, or both masks are given.
        NotImplementedError: Inside a transform of `torch.func` or under forward-mode differentiation, and if the kernel
            asked for by name cannot run this.
    """
    if mesh.sp.size > 1:
        refuse_transforms("The sequence of this attention", (query, key, value))
    lengths = tuple(lengths) if lengths is not None else (query.shape[1],) * mesh.sp.size
    key_lengths = tuple(key_lengths) if key_lengths is not None else None
    axis = mesh.ulysses
    place = _MeshPosition(mesh.sp.rank, mesh.sp.size, mesh.ring.rank, axis.rank, axis.size)
    checked = _checked if torch.compiler.is_compiling() else _known
    heads = checked(query.shape, key.shape, value.shape, place, lengths, key_lengths)
    key_lengths = key_lengths if key_lengths is not None else lengths
    transport = transport if transport is not None else DEFAULT_TRANSPORT
    scale = scale if scale is not None else query.shape[3] ** -0.5
    mask = whole_key_mask
    if mask is not None:
        _check_whole_mask(key, mask, key_lengths, key_mask)
    if key_mask is not None:
        _check_mask(key, key_mask)
        mask = gather_mask(key_mask, key_lengths, mesh, transport)
    q, k, v = as_autocast(query, key, value)
    ulysses = Ulysses(axis, heads, transport, number) if axis.size > 1 else None
    if ulysses is not None:
        q, k, v = scatter_heads(q, k, v, ulysses)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    choices = as_choices(attention_backend)
    is_open, repeats = whole_key_mask is not None, heads.repeats
    out = attend_heads(
        q, k, v, mesh, key_lengths, repeats, transport, scale, choices, mask, is_open=is_open, number=number
    )
    return gather_heads(out, ulysses) if ulysses is not None else out.transpose(1, 2)


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: SequenceMesh,
    key_lengths: tuple[int, ...],
    repeats: tuple[int, ...],
    transport: Transport,
    scale: float,
    choices: AttentionChoices,
    mask: Tensor | None = None,
    *,
    is_open: bool = False,
    number: int | None = None,
) -> Tensor:
    """Attends between the exchanges of Ulysses: alone, or with the other Ulysses groups in a ring.

    Args:
        query: (B, h, S, D), this rank's heads for all tokens of its Ulysses group.
        key: (B, h', T, D) likewise.
        value: As ``key``.
        mesh: Its ``ring`` axis is used.
        key_lengths: Keys of each rank of ``mesh.sp``.
        repeats: How many query heads each key/value head serves, in their order.
        transport: What sends a ring's blocks.
        scale: Factor on the logits.
        choices: What chooses the kernel.
        mask: (B, keys of all ranks of ``mesh.sp``) bool, True where a key may be attended.
        is_open: Every sample of the mask is known to have such a key.
        number: Of the group, if compiled code is to exchange by ops, see `parallel.schedules.ops`.

    Returns:
        (B, h, S, D).

    Raises:
        ValueError: In a ring inside of a mode of torch that may change attention.
    """
    if mesh.ring.size == 1:
        key, value = repeat_heads(key, repeats), repeat_heads(value, repeats)
        return attention(choices, query, key, value, scale, mask, is_open=is_open)
    refuse_modes("Ring attention")
    size = mesh.ulysses.size
    keys = tuple(sum(key_lengths[first : first + size]) for first in range(0, mesh.sp.size, size))
    ring = Ring(mesh.ring, keys, repeats, scale, transport, choices)
    if number is not None and torch.compiler.is_compiling():
        return ring_attention_by_op(query, key, value, ring, mask, number)
    return ring_attention(query, key, value, ring, mask)


def gather_mask(key_mask: Tensor, lengths: tuple[int, ...], mesh: SequenceMesh, transport: Transport) -> Tensor:
    """Returns the mask of all ranks' keys, on every rank, as every rank attends to all keys; collective over `sp`.

    Args:
        key_mask: (B, t) bool of this rank's keys.
        lengths: Keys of each rank.
        mesh: The mesh.
        transport: How messages are sent, a byte per token.

    Returns:
        (B, keys of all ranks) bool.
    """
    if mesh.sp.size == 1:
        return key_mask
    return transport.all_gather(key_mask.T.to(torch.uint8).contiguous(), lengths, mesh.sp).T.bool()


class _MeshPosition(NamedTuple):
    """Where a rank is in the mesh."""

    rank: int
    size: int
    ring: int
    ulysses: int
    ulysses_size: int


def _checked(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    place: _MeshPosition,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...] | None,
) -> HeadAssignment:
    """The heads of the ranks, for tensors of shapes that fit."""
    _check_shapes(query, key, value)
    of_keys = lengths if key_lengths is None else key_lengths
    _check_lengths(query, "query", place, lengths, "lengths")
    _check_lengths(key, "key", place, of_keys, "lengths" if key_lengths is None else "key_lengths")
    group = slice(place.ring * place.ulysses_size, (place.ring + 1) * place.ulysses_size)
    return assign_heads(place.ulysses, lengths[group], of_keys[group], query[2], key[2])


_known = lru_cache(maxsize=1024)(_checked)
"""All layers of a network ask the same; compiled code, which evaluates it once, does not look it up."""


def _check_shapes(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    fits = len(query) == len(key) == 4 and key == value
    if not fits or query[0] != key[0] or query[3] != key[3] or query[2] % key[2]:
        raise ValueError(
            "Attention over a split sequence needs a query (B, s, H, D), and a key and a value of one shape "
            f"(B, t, h, D) with H a multiple of h; got {tuple(query)}, {tuple(key)}, {tuple(value)}."
        )


def _check_lengths(x: torch.Size, what: str, place: _MeshPosition, lengths: tuple[int, ...], argument: str) -> None:
    if len(lengths) != place.size or lengths[place.rank] != x[1]:
        raise ValueError(
            f"This is rank {place.rank} of {place.size} and its {what} has {x[1]} tokens, but {argument}={lengths} "
            "says otherwise."
        )
    if min(lengths) == 0:
        raise ValueError(
            f"Attention needs a token of the {what} on each of {place.size} ranks, and they have {lengths}. Use a "
            "smaller sequence-parallel size or longer sequences (larger or longer clips)."
        )


def _check_mask(key: Tensor, key_mask: Tensor | None) -> None:
    if key_mask is not None and (key_mask.shape != key.shape[:2] or key_mask.dtype is not torch.bool):
        raise ValueError(
            f"key_mask must be bool of shape (B, t) = {tuple(key.shape[:2])}, True where a key may be attended; got "
            f"{key_mask.dtype} of {tuple(key_mask.shape)}."
        )


def _check_whole_mask(key: Tensor, mask: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None) -> None:
    if key_mask is not None:
        raise ValueError("key_mask is of this rank's keys and whole_key_mask of all ranks' keys: give one of them.")
    if mask.dtype is not torch.bool or mask.shape != (key.shape[0], sum(lengths)):
        raise ValueError(
            f"whole_key_mask must be bool of shape (B, keys of all ranks) = {(key.shape[0], sum(lengths))}, True where "
            f"a key may be attended; got {mask.dtype} of {tuple(mask.shape)}."
        )
