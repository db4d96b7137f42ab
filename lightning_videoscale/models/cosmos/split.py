"""The split plan and sizes of Cosmos 1, 2 and 2.5.

Text and images enter by cross-attention and stay whole. Timesteps are of samples, (B,), or of latent frames,
(B, 1, T, 1, 1). What the model makes of the latter it repeats over a frame's tokens, and every block and the output's
norm receive it for the whole video. Residuals of a ControlNet are split where blocks add them.
"""

from __future__ import annotations

from typing import Any

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_cosmos.CosmosTransformer3DModel"

# Cosmos 1 has a VAE of its own, later ones have Wan's.
GEOMETRIES = {
    "cosmos-1.0": ModelGeometry(temporal_stride=8),
    "cosmos-2": ModelGeometry(),
    "cosmos-2.5": ModelGeometry(),
}
# Sizes as in diffusers' scripts/convert_cosmos_to_diffusers.py.
TRANSFORMERS = {
    "cosmos-1.0-7b": TransformerFlops(28, 4096, 16384),
    "cosmos-1.0-14b": TransformerFlops(36, 5120, 20480),
    "cosmos-2-2b": TransformerFlops(28, 2048, 8192),
    "cosmos-2-14b": TransformerFlops(36, 5120, 20480),
    "cosmos-2.5-2b": TransformerFlops(28, 2048, 8192),
    "cosmos-2.5-14b": TransformerFlops(36, 5120, 20480),
}
FLOPS = {_MODEL: TransformerFlops.from_config}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}


def _split_plan(model: Any) -> SplitPlan:
    times = {"embedded_timestep": Split(1, ndim=3), "temb": Split(1, ndim=3)}
    learned = {} if model.learnable_pos_embed is None else {"learnable_pos_embed": {0: Split(1)}}
    return SplitPlan(
        inputs={
            "transformer_blocks.0": {"hidden_states": Split(1)},
            "transformer_blocks.*": {**times, "controlnet_residual": Split(1)},
            "norm_out": times,
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}, **learned},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {
    _MODEL: lambda _: {"transformer_blocks.*.attn1": {"video": Projection(rotary="image_rotary_emb", halves=True)}}
}
