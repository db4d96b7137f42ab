"""Timesteps per token (diffusers' Wan 2.2 TI2V) of which many are the same, embedded and modulated once each.

There a clip's given frame has timestep 0 and all other tokens share one, yet diffusers projects every token's to a
modulation of 6·D channels. The fused forward of the embedding does so for the U different timesteps and says which one
each token has; the fused blocks read it by that, and (B, S, 6, D) never exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.injection.fused_block import FusedBlock, original_forward
from lightning_videoscale.models.wan import WAN_BLOCK, GroupedModulation

_EMBEDDING_FORWARDS = frozenset({"d051433f8d4607c6", "4e1287c165e31a70"})  # diffusers 0.37 to 0.40, 0.41 and 0.42


class _Repeated(NamedTuple):
    """The different timesteps, (U,), and which one each token has, (B, S)."""

    values: Tensor
    which: Tensor


def _repeated(timestep: Tensor, tokens: int | None) -> _Repeated | None:
    """Returns what repeats in (B·S,) timesteps, or None where fewer than half do, and in a compiled forward.

    How many are different decides over shapes, hence the host waits for the device, once in a forward.
    """
    if tokens is None or torch.compiler.is_compiling():
        return None
    values, which = torch.unique(timestep, return_inverse=True)
    return _Repeated(values, which.unflatten(0, (-1, tokens))) if 2 * len(values) <= len(timestep) else None


def _forward(
    self: Any,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_image: Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[Tensor, Tensor | GroupedModulation, Tensor, Tensor | None]:
    """The fused forward; the embedding of each token, for the model's head, is gathered, its modulation is not."""
    embed = original_forward(self)
    repeated = _repeated(timestep, timestep_seq_len)
    if repeated is None:
        embedded: Any = embed(timestep, encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len)
    else:
        temb, modulation, *contexts = embed(repeated.values, encoder_hidden_states, encoder_hidden_states_image, None)
        embedded = temb[repeated.which], GroupedModulation(modulation, repeated.which), *contexts
    return embedded  # type: ignore[no-any-return]


WAN_TIMESTEPS = FusedBlock(
    class_path="diffusers.models.transformers.transformer_wan.WanTimeTextImageEmbedding",
    forward=_forward,
    what="timesteps that repeat over tokens are embedded once",
    known_forwards=_EMBEDDING_FORWARDS,
    only_with=WAN_BLOCK.class_path,
)
