"""The layer that is measured: projections, exchange, attention and output projection, under each schedule.

`TrialLayer`  weights and inputs of a kind of layer, and what a model does with them
`TrialGroup`       the ranks that run it, and by what

Masks and norms of single heads are left out: they take the same time under all schedules. All tokens are as wide.

Shapes: B batch, s tokens of this rank, C channels, H heads, h heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.kernels import qk_norm_rope, qkv_linear
from lightning_videoscale.parallel.attention import attend_heads, sequence_parallel_attention
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.attention_output import attend_and_send, project_output
from lightning_videoscale.parallel.schedules.input_projections import QueryKeyNorm, project_heads
from lightning_videoscale.parallel.schedules.table import ScheduleKey, schedules_of
from lightning_videoscale.parallel.sharding import split_sizes
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.ulysses import Ulysses, assign_heads

_MOST_FLOPS = 4e13  # of attention in a pass, on one rank: some 0.1 s on an H200, 0.25 s on an A100
_MOST_FLOPS_CPU = 1e9
_EPS = 1e-6

_Biases = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class TrialGroup:
    """The ranks that share a sequence, and by what they compute and exchange."""

    mesh: SequenceMesh
    transport: Transport
    attention: AttentionChoices
    device: torch.device


@dataclass(frozen=True)
class _Stream:
    """Tokens with the same projections.

    Attributes:
        lengths: Tokens of each rank of ``mesh.sp``.
        qkv: Weights of the projections, (H · D, C) or of fewer heads.
        biases: Likewise, (H · D,); None where the layer has none.
        output: Weight and bias of the output, (C, H · D) and (C,), or the weight; empty if it is not projected.
        x: (B, s, C), this rank's tokens.
        dy: The gradient of what becomes of them.
    """

    lengths: tuple[int, ...]
    qkv: tuple[Tensor, Tensor, Tensor]
    biases: _Biases
    output: tuple[Tensor, ...]
    x: Tensor
    dy: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.qkv, *(bias for bias in self.biases if bias is not None), *self.output

    @property
    def output_linear(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the output; None if it is not projected."""
        return (self.output[0], self.output[1] if len(self.output) > 1 else None) if self.output else None


class TrialLayer:
    """Weights and inputs of a kind of layer, long ones shortened to a pass of tens of milliseconds."""

    def __init__(self, key: ScheduleKey, group: TrialGroup) -> None:
        self._key, self._group, self._scale = key, group, key.head_dim**-0.5
        counts = shortened(key, group.device)
        lengths = [split_sizes(tokens, group.mesh.sp.size) for tokens in counts]
        self._lengths = tuple(map(sum, zip(*lengths, strict=True)))
        generator, dtype = torch.Generator(group.device).manual_seed(0), getattr(torch, key.dtype)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(*shape, device=group.device, generator=generator) * scale
            return x.to(dtype).requires_grad_()

        inner, few = key.heads * key.head_dim, key.kv_heads * key.head_dim

        def bias(rows: int) -> Tensor | None:
            return draw(rows) if key.has_biases else None

        def of_output() -> tuple[Tensor, ...]:
            drawn = draw(key.width, inner, scale=inner**-0.5), bias(key.width)
            return tuple(each for each in drawn if each is not None)

        weights = [
            (
                [draw(rows, key.width, scale=key.width**-0.5) for rows in (inner, few, few)],
                [bias(rows) for rows in (inner, few, few)],
                of_output() if key.is_projected else (),
            )
            for _ in counts
        ]
        self._norms = tuple(draw(rows) for rows in (inner, few)) if key.across_heads else ()
        angles = torch.rand(sum(counts), key.head_dim // 2, device=group.device, generator=generator)
        self._tables = angles.cos(), angles.sin()
        # Last, since ranks may differ in how many tokens they have, and must not in their weights.
        rank, width = group.mesh.sp.rank, key.width if key.is_projected else inner
        self._streams = [
            _Stream(
                each,
                (q, k, v),
                (of_q, of_k, of_v),
                output,
                draw(key.batch, each[rank], key.width),
                draw(key.batch, each[rank], width),
            )
            for each, ((q, k, v), (of_q, of_k, of_v), output) in zip(lengths, weights, strict=True)
        ]

    def runs(self) -> dict[ScheduleName, Callable[[Transport], Sequence[Tensor]]]:
        """Returns forward and backward by schedule.

        Each returns the output of each stream, the gradient of its input, and those of the weights.
        """
        ways: dict[ScheduleName, Callable[[Transport], Sequence[Tensor]]] = {
            "serial": self._serial,
            "overlap": partial(self._hiding, by_slices=False),
            "sliced": partial(self._hiding, by_slices=True),
        }

        def passing(forward: Callable[[Transport], Sequence[Tensor]]) -> Callable[[Transport], Sequence[Tensor]]:
            return lambda transport: self._pass(forward, transport)

        return {name: passing(ways[name]) for name in schedules_of(self._key)}

    def _pass(self, forward: Callable[[Transport], Sequence[Tensor]], transport: Transport) -> Sequence[Tensor]:
        inputs = [stream.x for stream in self._streams]
        weights = [weight for stream in self._streams for weight in stream.weights]
        with torch.enable_grad(), torch.autocast(self._group.device.type, enabled=False):
            out = forward(transport)
            cotangents = [stream.dy.detach() for stream in self._streams]
            gradients = torch.autograd.grad(out, [*inputs, *weights, *self._norms], cotangents)
        return *(x.detach() for x in out), *gradients

    def _serial(self, transport: Transport) -> Sequence[Tensor]:
        dim, mesh = self._key.head_dim, self._group.mesh
        projected = [qkv_linear(stream.x, stream.qkv, self._biases_of(stream)) for stream in self._streams]
        query, key, value = (_joined(each, 1).unflatten(-1, (-1, dim)) for each in zip(*projected, strict=True))
        if self._norms:
            rank = mesh.sp.rank
            first = sum(self._lengths[:rank])
            cos, sin = (table[first : first + self._lengths[rank]] for table in self._tables)
            of_query, of_key, _ = self._streams[0].biases
            query, key = qk_norm_rope(
                query, key, *self._norms, q_proj_bias=of_query, k_proj_bias=of_key, eps=_EPS, rope=(cos, sin)
            )
        out = sequence_parallel_attention(
            query,
            key,
            value,
            mesh,
            lengths=self._lengths,
            transport=transport,
            attention_backend=self._group.attention,
        )
        parts = out.flatten(2).split([stream.x.shape[1] for stream in self._streams], 1)
        pairs = zip(parts, self._streams, strict=True)
        return [F.linear(x, *stream.output) if stream.output else x for x, stream in pairs]

    def _biases_of(self, stream: _Stream) -> _Biases:
        """Those of the projections; where norms are over all heads, their kernel sums the gradients of two."""
        query, key, value = stream.biases
        if query is None or key is None or not self._norms:
            return stream.biases
        return query.detach(), key.detach(), value

    def _hiding(self, transport: Transport, *, by_slices: bool) -> Sequence[Tensor]:
        mesh, heads = self._group.mesh, self._key.heads
        groups = [self._ulysses(stream.lengths, transport) for stream in self._streams]
        parts = []
        for stream, ulysses in zip(self._streams, groups, strict=True):
            norm = self._norm_across_heads(ulysses) if self._norms else None
            linears = list(zip(stream.qkv, stream.biases, strict=True))
            parts.append(project_heads(stream.x, linears, norm, ulysses, heads, by_slices=by_slices))
        query, key, value = (
            _joined(each, 2) for each in zip(*((part.query, part.key, part.value) for part in parts), strict=True)
        )
        arrived: Sequence[Tensor | None] = [None] * len(self._streams)
        if by_slices and mesh.ring.size == 1:
            lengths = [stream.lengths for stream in self._streams]
            together = self._ulysses(self._lengths, transport)
            out, arriving = attend_and_send(query, key, value, together, lengths, self._group.attention, self._scale)
            arrived = arriving().split([stream.x.shape[1] for stream in self._streams], 1)
        else:
            one = groups[0].heads.repeats
            out = attend_heads(
                query, key, value, mesh, self._lengths, one, transport, self._scale, self._group.attention
            )
        of_streams = out.split([sum(self._of_group(stream.lengths)) for stream in self._streams], 2)
        return [
            project_output(x, stream.output_linear, ulysses, here, by_slices=by_slices)
            for x, stream, ulysses, here in zip(of_streams, self._streams, groups, arrived, strict=True)
        ]

    def _of_group(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the ranks of the Ulysses group."""
        mesh = self._group.mesh
        first = mesh.ring.rank * mesh.ulysses.size
        return lengths[first : first + mesh.ulysses.size]

    def _ulysses(self, lengths: tuple[int, ...], transport: Transport) -> Ulysses:
        axis, of_group, heads = self._group.mesh.ulysses, self._of_group(lengths), self._key.heads
        return Ulysses(axis, assign_heads(axis.rank, of_group, of_group, heads, heads), transport)

    def _norm_across_heads(self, ulysses: Ulysses) -> QueryKeyNorm:
        """That of the one stream whose norms are over all heads."""
        mesh, dim = self._group.mesh, self._key.head_dim
        mine = ulysses.heads.out.heads[0][ulysses.axis.rank]
        weights = [weight[mine.start * dim : mine.stop * dim] for weight in self._norms]
        first, tokens = sum(self._lengths[: mesh.ring.rank * mesh.ulysses.size]), sum(self._of_group(self._lengths))
        batch, dtype = self._key.batch, torch.promote_types(self._norms[0].dtype, torch.float32)
        of_group = (table[first : first + tokens].to(dtype) for table in self._tables)
        tables = [table.repeat_interleave(batch, 0)[None, :, None] for table in of_group]
        across = NormAcrossHeads(self._key.heads * dim, _EPS, "fp32_once")
        return QueryKeyNorm(across, NormTensors(weights, tables))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def shortened(key: ScheduleKey, device: torch.device) -> list[int]:
    """Returns how many tokens a trial has: as the kind, or so many that a pass is short; one for each rank at least.

    Those apart come second, if there are any, and are shortened alike.
    """
    flops = 14 * key.batch * key.tokens**2 * key.heads * key.head_dim / (key.ulysses * key.ring)
    most, ranks = _MOST_FLOPS if device.type == "cuda" else _MOST_FLOPS_CPU, key.ulysses * key.ring
    share = min(1.0, (most / flops) ** 0.5)
    tokens, apart = int(key.tokens * share), max(int(key.apart * share), ranks)
    return [max(tokens - apart, ranks), apart] if key.apart else [max(tokens, ranks)]
