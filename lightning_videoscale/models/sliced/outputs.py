"""What an attention returns, sent home and projected there: `outputs`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_videoscale.injection.branch_bias import changed_linear
from lightning_videoscale.models.sliced.groups import Place, Streams
from lightning_videoscale.parallel.schedules.messages import Linear
from lightning_videoscale.parallel.schedules.sliced_output import project_output


def outputs(attn: Any, attended: Any, described: Streams, place: Place, *, detach_bias: bool) -> Any:
    """Returns what the attention would of this rank's tokens.

    Args:
        attn: The attention.
        attended: What its view returned: (B, S, h · D) of all streams, or a tuple of that of ``hidden_states`` and that
            of ``encoder_hidden_states``.
        described: Its streams.
        place: Where tokens and heads are.
        detach_bias: Leaves the gradient of the bias behind ``hidden_states`` to the caller.
    """
    if isinstance(attended, Tensor):
        members: list[tuple[str, ...]] = [tuple(described)]
        parts = dict(zip(described, _split(attended, members[0], place), strict=True))
    else:
        members = [_streams_of(name, described) for name in ("hidden_states", "encoder_hidden_states")]
        parts = {
            s: x for m, y in zip(members, attended, strict=True) for s, x in zip(m, _split(y, m, place), strict=True)
        }
    projected: dict[tuple[str, ...], Tensor] = {}
    for streams in _by_output(attn, described):
        module = getattr(attn, described[streams[0]].output, None)
        detach = detach_bias and any(described[stream].tokens == "hidden_states" for stream in streams)
        joined = place.by_rank([parts[stream] for stream in streams], streams)
        projected[streams] = _home(module, joined, streams, place, detach)
    if isinstance(attended, Tensor) and len(projected) == 1:
        return projected[members[0]]
    local: dict[str, Tensor] = {}
    rank = place.context.mesh.sp.rank
    for streams, x in projected.items():
        lengths = [place.context.lengths((stream,))[rank] for stream in streams]
        local |= dict(zip(streams, x.split(lengths, 1), strict=True))
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


def _split(x: Tensor, streams: tuple[str, ...], place: Place) -> list[Tensor]:
    """Each stream's tokens of (B, S, C)."""
    return list(x.split([place.tokens((stream,)) for stream in streams], 1))


def _home(module: nn.Module | None, x: Tensor, streams: tuple[str, ...], place: Place, detach_bias: bool) -> Tensor:
    """Sends every rank its tokens' heads, (B, S, h · D), and projects those that come; (B, s, C)."""
    layers = [] if module is None else list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else [module]
    linear: Linear | None = None
    if layers and changed_linear(layers[0]) is None:
        first: Any = layers.pop(0)
        linear = first.weight, first.bias.detach() if detach_bias and first.bias is not None else first.bias
    heads = x.unflatten(2, (len(place.mine), -1)).transpose(1, 2)
    y = project_output(heads, linear, place.ulysses(streams))
    for layer in [] if detach_bias else layers:  # nothing is dropped then
        y = layer(y)
    return y
