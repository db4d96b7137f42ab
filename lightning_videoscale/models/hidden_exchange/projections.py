"""Queries, keys and values of an attention's streams, sent as they are computed: `project`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.models.hidden_exchange.across_heads import norm_across
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement, StreamGroup, Streams
from lightning_videoscale.parallel import Projection
from lightning_videoscale.parallel.schedules.input_projections import Heads, QueryKeyNorm, project_heads
from lightning_videoscale.parallel.schedules.messages import Linear


class Arrived(NamedTuple):
    """What a group's projections made.

    Attributes:
        heads: Of this rank, of all tokens.
        norm: What queries and keys went through; None if their norms are left to the attention.
    """

    heads: Heads
    norm: QueryKeyNorm | None

    def by_linear(self, group: StreamGroup, place: HeadPlacement) -> dict[str, Tensor]:
        """By the name of the Linear, (B, S, h · D), all tokens of a stream before those of the next."""
        three = (x.transpose(1, 2).flatten(2) for x in (self.heads.query, self.heads.key, self.heads.value))
        return {
            name: place.by_stream(x, group.streams)
            for name, x in zip(group.projection.linears, three, strict=True)
            if name is not None
        }


def project(
    attn: Any,
    group: StreamGroup,
    described: Streams,
    arguments: Mapping[str, Any],
    place: HeadPlacement,
    *,
    by_slices: bool,
) -> Arrived:
    """Projects a group's tokens and exchanges them."""
    x = group.tokens(described, arguments)
    norm, projection = None, group.projection
    if projection.across_heads:
        tables = None if projection.rotary is None else arguments.get(projection.rotary)
        norm = norm_across(attn, projection, tables, group.streams[0], place, x)
    linears = linears_of(attn, projection, x)
    ulysses = place.ulysses(group.streams)
    return Arrived(project_heads(x, linears, norm, ulysses, place.heads, by_slices=by_slices), norm)


def linears_of(attn: Any, projection: Projection, x: Tensor) -> list[Linear | Tensor]:
    """Returns each Linear of an attention as it is, or where it is more than that, what it returns of x."""
    if projection.joined is not None and getattr(attn, "fused_projections", False):
        return list(getattr(attn, projection.joined)(x).chunk(3, dim=-1))
    return [_linear(getattr(attn, str(name)), x) for name in projection.linears]


def _linear(linear: nn.Module, x: Tensor) -> Linear | Tensor:
    if changed_linear(linear) is not None:
        returned: Tensor = linear(x)
        return returned
    return linear.weight, linear.bias  # type: ignore[return-value]
