"""The fused block of Cosmos: adaptive norms whose modulation two small Linears add to the timestep's.

All is rounded after every operation, as diffusers' code does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, per_sample
from lightning_videoscale.injection.norms import LAYER_NORM, TRIED
from lightning_videoscale.injection.parts import KnownClass, Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.cosmos.attention import HOME

_ADAPTIVE_NORM = KnownClass(
    f"{HOME}.CosmosAdaLayerNormZero",
    "diffusers' CosmosAdaLayerNormZero",
    {"c02448b2b5f46757-84d2787f6ce46f626f4ec2ea215573": TRIED},
)


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Any = None,
    extra_pos_emb: Tensor | None = None,
    attention_mask: Any = None,
    controlnet_residual: Tensor | None = None,
    latents: Tensor | None = None,
    block_idx: int | None = None,
) -> Any:
    if self.before_proj is not None:
        hidden_states = self.before_proj(hidden_states) + latents
    if extra_pos_emb is not None:
        hidden_states = hidden_states + extra_pos_emb
    stream = ResidualStream(self, hidden_states, rounding="eager")
    branches: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
        (self.attn1, self.norm1, {"image_rotary_emb": image_rotary_emb}),
        (self.attn2, self.norm2, {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}),
        (self.ff, self.norm3, {}),
    )
    for module, norm, named in branches:
        stream.branch(module, norm.norm, _embedded(norm, embedded_timestep, temb, hidden_states), **named)
    hidden_states = stream.end()
    if controlnet_residual is not None:
        assert self.after_proj is None
        hidden_states += controlnet_residual  # in the stream's dtype
    if self.after_proj is not None:
        assert controlnet_residual is None
        return hidden_states, self.after_proj(hidden_states)
    return hidden_states


def _embedded(norm: Any, embedded_timestep: Tensor, temb: Tensor | None, x: Tensor) -> Modulation:
    """Of timesteps (B, D) of samples or (B, S, D) of tokens."""
    embedded = norm.linear_2(norm.linear_1(norm.activation(embedded_timestep)))
    if temb is not None:
        embedded = embedded + temb
    return per_sample(embedded, 1, x.shape[0])[0]


_NORMS = ("norm1", "norm2", "norm3")
_BLOCK = FusedBlock(
    class_path=f"{HOME}.CosmosTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate (2), gate_residual",
    known_forwards={"b6f089d943a27dc7-f82d6b1809fe06e521c9606d52154e1b4e6f9c977b44c": TRIED},
    parts=(*(Part(name, _ADAPTIVE_NORM) for name in _NORMS), *(Part(f"{name}.norm", LAYER_NORM) for name in _NORMS)),
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
