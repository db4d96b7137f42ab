"""What an attention returns, sent home and projected there: `outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement, Streams
from lightning_videoscale.parallel.schedules.attention_output import project_output
from lightning_videoscale.parallel.schedules.messages import Linear, return_tokens, rows_of
from lightning_videoscale.parallel.ulysses import Ulysses


def outputs(
    attn: Any,
    attended: Any,
    described: Streams,
    place: HeadPlacement,
    arrived: Tensor | None,
    *,
    by_slices: bool,
    detach_bias: bool,
    check: bool,
) -> Any:
    """Returns what the attention would of this rank's tokens.

    Args:
        attn: The attention.
        attended: What its view returned: (B, S, h · D) of all streams, or a tuple of that of ``hidden_states`` and that
            of ``encoder_hidden_states``.
        described: Its streams.
        place: Where tokens and heads are.
        arrived: (B, s, H · D) of this rank's tokens of all streams, if they were sent as they were attended.
        by_slices: As for `project_output`.
        detach_bias: Leaves the gradient of the bias behind ``hidden_states`` to the caller.
        check: Whether to compare what ``arrived`` with what the view returned; collective over the Ulysses group.

    Raises:
        ValueError: If they differ.
    """
    if isinstance(attended, Tensor):
        members: list[tuple[str, ...]] = [tuple(described)]
        parts = dict(zip(described, _split(attended, members[0], place), strict=True))
    else:
        members = [_streams_of(name, described) for name in ("hidden_states", "encoder_hidden_states")]
        parts = {
            s: x for m, y in zip(members, attended, strict=True) for s, x in zip(m, _split(y, m, place), strict=True)
        }
    mine = {} if arrived is None else _by_name(arrived, tuple(described), place)
    projected: dict[tuple[str, ...], Tensor] = {}
    for streams in _by_output(attn, described):
        module = getattr(attn, described[streams[0]].output, None)
        detach = detach_bias and any(described[stream].tokens == "hidden_states" for stream in streams)
        joined = place.by_rank([parts[stream] for stream in streams], streams)
        here = _joined([mine[stream] for stream in streams]) if mine else None
        heads, ulysses = joined.unflatten(2, (len(place.mine), -1)).transpose(1, 2), place.ulysses(streams)
        if check and here is not None:
            _check_same(heads.detach(), here, ulysses)
        layers, linear = _layers(module, detach_bias=detach)
        y = project_output(heads, linear, ulysses, here, by_slices=by_slices)
        for layer in layers:
            y = layer(y)
        projected[streams] = y
    if isinstance(attended, Tensor) and len(projected) == 1:
        return projected[members[0]]
    local: dict[str, Tensor] = {}
    for streams, x in projected.items():
        local |= _by_name(x, streams, place)
    return tuple(local[stream] for (stream,) in members)


def _streams_of(name: str, described: Streams) -> tuple[str, ...]:
    return tuple(stream for stream, projection in described.items() if projection.tokens == name)


def _by_output(attn: Any, described: Streams) -> list[tuple[str, ...]]:
    """Streams that go through one module, or through none, together."""
    found: dict[str | None, list[str]] = {}
    for stream, projection in described.items():
        there = getattr(attn, projection.output, None) is not None
        found.setdefault(projection.output if there else None, []).append(stream)
    return [tuple(streams) for streams in found.values()]


def _split(x: Tensor, streams: tuple[str, ...], place: HeadPlacement) -> list[Tensor]:
    """Each stream's tokens of (B, S, C)."""
    return list(x.split([place.tokens((stream,)) for stream in streams], 1))


def _by_name(x: Tensor, streams: tuple[str, ...], place: HeadPlacement) -> dict[str, Tensor]:
    """Each stream's tokens of this rank, of (B, s, C)."""
    rank = place.context.mesh.sp.rank
    lengths = [place.context.lengths((stream,))[rank] for stream in streams]
    return dict(zip(streams, x.split(lengths, 1), strict=True))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _layers(module: nn.Module | None, *, detach_bias: bool) -> tuple[list[nn.Module], Linear | None]:
    """What is called of an output's layers, after the Linear that is not."""
    layers = [] if module is None else list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else [module]
    if not layers or changed_linear(layers[0]) is not None:
        return layers, None
    first: Any = layers[0]
    bias = first.bias.detach() if detach_bias and first.bias is not None else first.bias
    return [] if detach_bias else layers[1:], (first.weight, bias)  # nothing is dropped then


def _check_same(heads: Tensor, arrived: Tensor, ulysses: Ulysses) -> None:
    """Refuses an attention that changes what it attended."""
    again = return_tokens(rows_of(heads), ulysses, heads.shape[0])()
    if not torch.allclose(again, arrived.to(again.dtype), rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            "Between its attention and its output projection it computes, and the schedule 'sliced' has sent what came "
            "out of attention. Use schedule='serial'."
        )
