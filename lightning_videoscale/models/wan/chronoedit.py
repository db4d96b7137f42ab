"""ChronoEdit as diffusers has it (`ChronoEditTransformer3DModel`).

A Wan whose rotary table of two latent frames puts them apart, made of copies of Wan's classes. Their attention is
redirected.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.models.wan.block import copies
from lightning_videoscale.models.wan.fused_attention import CHRONOEDIT
from lightning_videoscale.models.wan.sizes import flops
from lightning_videoscale.models.wan.split import TIMESTEP, projections
from lightning_videoscale.models.wan.timesteps import fused_timesteps
from lightning_videoscale.parallel import Attention, Split, SplitPlan

_MODEL = f"{CHRONOEDIT}.ChronoEditTransformer3DModel"

GEOMETRIES = {"chronoedit": ModelGeometry()}
TRANSFORMERS = {"chronoedit-14b": TransformerFlops(40, 5120, 13824)}  # transformer/config.json of nvidia's release
FLOPS = {_MODEL: flops}


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {"timestep": TIMESTEP}, "blocks.0": {"hidden_states": Split(1)}},
        outputs={"rope": {0: Split(1, keeps_whole=True), 1: Split(1, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={"blocks.*.attn1": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {_MODEL: projections}

_BLOCK, _ATTENTION = copies(CHRONOEDIT)
_TIMESTEPS = fused_timesteps(f"{CHRONOEDIT}.WanTimeTextImageEmbedding", _BLOCK.class_path)
FUSED_BLOCKS = {block.class_path: block for block in (_BLOCK, _ATTENTION, _TIMESTEPS)}
