"""Wan Animate as diffusers has it (`WanAnimateTransformer3DModel`).

Copies of Wan's blocks, whose attention is redirected, and face adapters after some of them: each frame's tokens attend
to what a motion encoder made of the face in that frame. Adapters cut the sequence into frames, hence they see it whole,
and every rank computes all of them.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.models.wan.block import copies
from lightning_videoscale.models.wan.fused_attention import ANIMATE
from lightning_videoscale.models.wan.sizes import flops
from lightning_videoscale.models.wan.split import projections
from lightning_videoscale.parallel import Attention, Split, SplitPlan, Whole

_MODEL = f"{ANIMATE}.WanAnimateTransformer3DModel"

GEOMETRIES = {"wan2.2-animate": ModelGeometry()}
TRANSFORMERS = {"wan2.2-animate-14b": TransformerFlops(40, 5120, 13824)}  # config.json of Wan-AI/Wan2.2-Animate-14B
FLOPS = {_MODEL: flops}  # of the blocks: encoders of motion and faces, and the adapters, are left out

BLOCKS = {_MODEL: ("blocks.*", "face_adapter.*")}


def _split_plan(model: nn.Module) -> SplitPlan:
    tokens = Split(1)
    return SplitPlan(
        inputs={"blocks.0": {"hidden_states": tokens}},
        outputs={"rope": {0: tokens, 1: tokens}},
        gathers={"proj_out": {0: tokens}},
        attention={"blocks.*.attn1": Attention()},
        whole={"face_adapter.*": Whole({"hidden_states": tokens}, {0: tokens})},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {_MODEL: projections}
FUSED_BLOCKS = {block.class_path: block for block in copies(ANIMATE)}  # it has no timesteps of tokens
