"""What an attention is called with, of all tokens of a Ulysses group instead of this rank's.

Tokens themselves are not: what its projections would make of them has arrived. Their place is held by a tensor that has
a sample and a token for each, and nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.compat.torch.trees import tree_leaves
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement, Streams
from lightning_videoscale.models.hidden_exchange.whole import whole_of
from lightning_videoscale.parallel import Projection, Split
from lightning_videoscale.parallel.plan import Attention
from lightning_videoscale.parallel.redirection import uneven

_TOKENS = {"sd": 0, "shd": 0, "bshd": 1, "bsc": 1, "matrices": 1, "bhsd": 2, "dict": 2, "complex": -2, "axes": 1}
"""By layout of rotary tables, the dim of tokens."""


def refused_argument(arguments: Mapping[str, Any], described: Streams, rule: Attention) -> str | None:
    """Returns what only "serial" takes: a tensor of which nobody says whose tokens it has, tables with a gradient."""
    known = {*rule.arguments, *(p.tokens for p in described.values()), *(p.rotary for p in described.values())}
    others = [
        name
        for name, value in arguments.items()
        if name not in known and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    ]
    if others:
        return f"its split plan does not say whose tokens its argument {others[0]!r} has"
    rotations = [arguments.get(p.rotary) for p in described.values() if p.across_heads and p.rotary is not None]
    return learned_tables(rotations)


def learned_tables(tables: Any) -> str | None:
    """Returns what stands against rotary tables where norms over all heads rotate, too: those compute no gradient."""
    learned = [table for table in tree_leaves(tables) if isinstance(table, Tensor) and table.requires_grad]
    if not learned or not torch.is_grad_enabled():
        return None
    return "its rotary tables require a gradient, as of the positions that they are made of"


def uneven_mask(arguments: Mapping[str, Any], rule: Attention, *, by_values: bool) -> str | None:
    """Returns what stands against masks of pairs of tokens, of which `of_all_tokens` takes what they say of keys."""
    for name, split in rule.arguments.items():
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and _is_of_pairs(mask, split) and mask.stride(2):
            if not rule.padded_rows or mask.shape[2] != mask.shape[3]:
                return f"its mask {tuple(mask.shape)} has a dim of queries."
            if by_values and (objection := uneven(mask)) is not None:
                return objection
    return None


def of_all_tokens(
    arguments: Mapping[str, Any], described: Streams, rule: Attention, place: HeadPlacement, tokens: Tensor
) -> dict[str, Any]:
    """Returns the arguments by name.

    Args:
        arguments: Of this rank.
        described: The attention's streams.
        rule: What the plan says of it.
        place: Where tokens and heads are.
        tokens: Some of the tokens, (B, s, C).
    """
    whole, done = dict(arguments), []
    for stream, projection in described.items():
        count = place.tokens(projection.tokens_of or (stream,))
        whole[projection.tokens] = tokens.new_zeros(()).expand(tokens.shape[0], count, 1)
        name = projection.rotary
        if name is None or arguments.get(name) is None or (name, projection.rotary_part) in done:
            continue
        done.append((name, projection.rotary_part))
        if projection.across_heads:  # then they are rotated as they arrive
            whole[name] = None
        elif projection.rotary_part is None:
            whole[name] = tables_of_all(whole[name], stream, projection, place)
        else:
            members = list(whole[name])
            members[projection.rotary_part] = tables_of_all(members[projection.rotary_part], stream, projection, place)
            whole[name] = tuple(members)
    for name, split in rule.arguments.items():
        if arguments.get(name) is not None:
            whole[name] = _whole(_of_keys(arguments[name], split), split, place, keep=False)
    return whole


def tables_of_all(tables: Any, stream: str, projection: Projection, place: HeadPlacement) -> Any:
    """The rotary tables of all tokens, and where each head has its own, of this rank's heads."""
    layout = projection.layout
    split = Split(_TOKENS[layout], projection.rotary_of or (stream,))

    def whole(table: Tensor) -> Tensor:
        table = _whole(table, split, place)
        if layout == "bsc":
            channels = table.shape[2] // place.heads
            return table[..., place.mine.start * channels : place.mine.stop * channels]
        dim = {"bhsd": 1, "shd": 1}.get(layout)
        return table if dim is None else table.narrow(dim, place.mine.start, len(place.mine))

    if layout == "axes":
        by_axis, positions = tables
        return by_axis, type(positions)(map(whole, positions))
    if isinstance(tables, Tensor):
        return whole(tables)
    if isinstance(tables, Mapping):
        return {name: whole(table) for name, table in tables.items()}
    return tuple(map(whole, tables))


def _of_keys(mask: Tensor, split: Split) -> Tensor:
    """Of a mask of pairs of tokens, which counts keys and has rows of padding, that of the keys."""
    if not _is_of_pairs(mask, split):
        return mask
    return mask.diagonal(dim1=2, dim2=3)[:, :, None] if mask.stride(2) else mask[:, :, :1]


def _is_of_pairs(mask: Tensor, split: Split) -> bool:
    return mask.ndim == 4 and split.dim == 3 and mask.shape[2] > 1


def _whole(x: Tensor, split: Split, place: HeadPlacement, *, keep: bool = True) -> Tensor:
    """Of the Ulysses group's tokens, one stream behind the other; ``keep``: gathered once in a pass."""
    context, dim = place.context, split.dim % x.ndim
    if x.shape[dim] == 1 and context.lengths(split.streams)[context.mesh.sp.rank] != 1:
        return x  # the same for all tokens
    found = whole_of(x, dim, split.streams, context, keep=keep)
    parts = []
    for stream, part in zip(split.streams, _by_stream(found, dim, split.streams, place), strict=True):
        lengths, mesh = context.lengths((stream,)), context.mesh
        padding = (0, 0) * (part.ndim - 1 - dim) + (0, sum(lengths) - part.shape[dim])
        start = sum(lengths[: mesh.ring.rank * mesh.ulysses.size])
        parts.append((F.pad(part, padding) if any(padding) else part).narrow(dim, start, place.tokens((stream,))))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _by_stream(whole: Tensor, dim: int, streams: tuple[str, ...], place: HeadPlacement) -> list[Tensor]:
    counts = [place.context.record.tokens(stream) for stream in streams]
    return list(whole.split(counts, dim))
