"""The one entry to attention over a split sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.transport import CollectiveTransport, Transport
from lightning_videoscale.parallel.ulysses import ExchangeTable, gather_heads, scatter_heads


def sequence_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: SequenceMesh,
    *,
    lengths: tuple[int, ...] | None = None,
    transport: Transport | None = None,
    scale: float | None = None,
) -> Tensor:
    """Bidirectional self-attention over a sequence of which every rank of the group holds a slice.

    Equal to dense attention over the whole sequence, in value and gradient.

    Args:
        query: (B, s, H, D), this rank's s tokens; already normalised and rotated with this rank's positions.
        key: As ``query``.
        value: As ``query``.
        mesh: The mesh; its ``ulysses`` axis is used.
        lengths: Tokens of each rank of the group; all ranks hold s tokens if left out.
        transport: How bytes travel; functional collectives if left out.
        scale: Factor on the logits, ``D ** -0.5`` if left out.

    Returns:
        (B, s, H, D): attention output for this rank's tokens.

    Raises:
        ValueError: If there are fewer heads than Ulysses ranks, or the shapes do not fit ``lengths``.
        NotImplementedError: If the mesh has a ring axis of more than one rank.
    """
    if mesh.ring.size > 1:
        raise NotImplementedError(f"Ring attention is not available yet: ring_size={mesh.ring.size}; use ring_size=1.")
    if not query.shape == key.shape == value.shape:
        raise ValueError(
            "Self-attention over a split sequence needs query, key and value of one shape (B, s, H, D), got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    lengths = lengths if lengths is not None else (query.shape[1],) * mesh.ulysses.size
    if lengths[mesh.ulysses.rank] != query.shape[1]:
        raise ValueError(f"This rank holds {query.shape[1]} tokens, but lengths={lengths} says otherwise.")
    transport = transport if transport is not None else CollectiveTransport()
    table = ExchangeTable.create(mesh.ulysses, lengths, query.shape[2])
    query, key, value = scatter_heads(_as_autocast(query, key, value), table, transport)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale
    ).transpose(1, 2)
    return gather_heads((out,), table, transport)[0]


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast will do for the attention kernel anyway, so that no wider number is sent."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype is torch.float32 else x for x in tensors)
