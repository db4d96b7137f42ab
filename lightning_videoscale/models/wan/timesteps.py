"""The fused embedding of timesteps that repeat over tokens (TI2V).

Those of a clip's given frame are 0, all others share one. Yet diffusers projects every token's to a modulation of 6·D
channels. Here the U different ones are embedded once each and fused blocks read by index which one a token has, so that
(B, S, 6, D) never exists.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.injection.bypassed import has_readers
from lightning_videoscale.injection.fused_block import FusedBlock, original_forward, unfused
from lightning_videoscale.injection.modulation import GroupedModulation, find_repeated
from lightning_videoscale.injection.norms import TRIED
from lightning_videoscale.models.wan.block import FUSED_BLOCK
from lightning_videoscale.models.wan.fused_attention import MODULE


def _timesteps_forward(
    self: Any,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_image: Tensor | None = None,
    timestep_seq_len: int | None = None,
) -> tuple[Tensor, Tensor | GroupedModulation, Tensor, Tensor | None]:
    """The fused forward; the embedding of each token, for the model's head, is gathered, its modulation is not."""
    embed = original_forward(self)
    repeated = find_repeated(timestep, timestep_seq_len)
    if repeated is not None and has_readers(self):
        embed, repeated = unfused(self, "has hooks, which expect the modulation of every token"), None
    if repeated is None:
        embedded: Any = embed(timestep, encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len)
    else:
        temb, modulation, *contexts = embed(repeated.values, encoder_hidden_states, encoder_hidden_states_image, None)
        embedded = temb[repeated.which], GroupedModulation(modulation, repeated.which), *contexts
    return embedded  # type: ignore[no-any-return]


def fused_timesteps(class_path: str, block: str) -> FusedBlock:
    """Returns the replacement of an embedding that is Wan's, whatever its class is called."""
    return FusedBlock(
        class_path=class_path,
        forward=_timesteps_forward,
        what="timesteps that repeat over tokens are embedded once",
        known_forwards={"f9556c0f8bd6d661-b48c8d1f69195f4a30de2726444f5b": TRIED},
        only_with=block,
    )


FUSED_TIMESTEPS = fused_timesteps(f"{MODULE}.WanTimeTextImageEmbedding", FUSED_BLOCK.class_path)
