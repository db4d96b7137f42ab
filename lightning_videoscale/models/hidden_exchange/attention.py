"""Attention inside a view of this rank's heads: `AttendByHeads`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices, as_autocast
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement
from lightning_videoscale.parallel.attention import attend_heads
from lightning_videoscale.parallel.redirection import AttentionPlace, RedirectedAttention, key_mask
from lightning_videoscale.parallel.schedules.attention_output import attend_and_send


class AttendByHeads(RedirectedAttention):
    """Inside, the attention that is called has all tokens of the Ulysses group already, and this rank's heads.

    Attributes:
        arriving: Waits for what became of this rank's tokens, (B, s, H · D), if it is on its way already.
    """

    def __init__(self, at: AttentionPlace, place: HeadPlacement, by_torch: bool, *, by_slices: bool) -> None:
        super().__init__(at, by_torch)
        self._at, self._by_slices = place, by_slices
        self.arriving: Callable[[], Tensor] | None = None

    def tokens(self, streams: tuple[str, ...]) -> int:
        """As `RedirectedAttention.tokens`."""
        return self._at.tokens(streams)

    def masks(self, mask: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """As `RedirectedAttention.masks`, of all tokens of the group in both places, and not opened."""
        rule, mesh = self.place.rule, self._at.context.mesh
        start = mesh.ring.rank * mesh.ulysses.size
        missing = self._at.context.record.missing(rule.key_streams, range(start, start + mesh.ulysses.size))
        own = key_mask(mask, missing, query.shape[0], query.device, padded_rows=rule.padded_rows)
        return own, own, None

    def exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        choices: AttentionChoices,
    ) -> Tensor:
        """As `RedirectedAttention.exchanged`, of which a ring's blocks are left; what comes out is sent by slices."""
        context, mesh = self._at.context, self._at.context.mesh
        q, k, v = as_autocast(query, key, value)
        scale = scale if scale is not None else query.shape[3] ** -0.5
        streams, is_open = self.place.rule.queries, self.place.rule.unmasked is not None
        if mesh.ring.size == 1 and self._by_slices:
            by_stream = [self._at.lengths((stream,)) for stream in streams]
            out, self.arriving = attend_and_send(
                q,
                k,
                v,
                self._at.ulysses(streams),
                by_stream,
                choices,
                scale,
                mask,
                padded_rows=self.place.rule.padded_rows,
                is_open=is_open,
            )
            return out
        lengths = context.lengths(streams)
        if mask is not None and mesh.ring.size > 1:
            size = mesh.ulysses.size
            groups = tuple(sum(lengths[i : i + size]) for i in range(0, len(lengths), size))
            mask = context.transport.all_gather(mask.T.to(torch.uint8).contiguous(), groups, mesh.ring).T.bool()
        one = (1,) * q.shape[1]
        settings: dict[str, Any] = {"is_open": is_open, "number": context.number}
        return attend_heads(q, k, v, mesh, lengths, one, context.transport, scale, choices, mask, **settings)
