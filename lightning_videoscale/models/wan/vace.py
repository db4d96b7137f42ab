"""Wan VACE as diffusers has it (`WanVACETransformer3DModel`).

Beside Wan's blocks there are control blocks, whose attention is Wan's as well. All of them run first, on the control
tokens, which are as many as the video's; the first one also reads the video. What they return is added after some of
Wan's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.norms import TRIED
from lightning_videoscale.models.wan.block import BRANCHES, PARTS, WHAT, three_branches
from lightning_videoscale.models.wan.split import projections, split_attention
from lightning_videoscale.parallel import Projection, Split, SplitPlan
from lightning_videoscale.parallel.schedules import HIDING

_HOME = "diffusers.models.transformers.transformer_wan_vace"
_MODEL = f"{_HOME}.WanVACETransformer3DModel"

GEOMETRIES = {"wan2.1-vace": ModelGeometry()}
# transformer/config.json of Wan-AI/Wan2.1-VACE-1.3B-diffusers and -14B-diffusers: 15 and 8 control blocks.
TRANSFORMERS = {
    "wan2.1-vace-1.3b": TransformerFlops(30 + 15, 1536, 8960),
    "wan2.1-vace-14b": TransformerFlops(40 + 8, 5120, 13824),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    """Control blocks count as blocks; the linear layers at their ends, 1 of 14 or so, are left out."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return TransformerFlops(config["num_layers"] + len(config["vace_layers"]), width, config["ffn_dim"])


FLOPS = {_MODEL: _flops}

BLOCKS = {_MODEL: ("vace_blocks.*", "blocks.*")}


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "vace_blocks.0": {"hidden_states": Split(1), "control_hidden_states": Split(1)},
            "blocks.0": {"hidden_states": Split(1)},
        },
        outputs={"rope": {0: Split(1, keeps_whole=True), 1: Split(1, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention=partial(split_attention, paths=("vace_blocks.*.attn1", "blocks.*.attn1")),
        schedules=("serial", *HIDING),
    )


def _projections(model: nn.Module) -> Mapping[str, Mapping[str, Projection]]:
    (of_wan,) = projections(model).values()
    return {"vace_blocks.*.attn1": of_wan, "blocks.*.attn1": of_wan}


SPLIT_PLANS = {_MODEL: _split_plan}
PROJECTIONS = {_MODEL: _projections}


def _control_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    control_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
) -> tuple[Tensor | None, Tensor]:
    if self.proj_in is not None:
        control_hidden_states = self.proj_in(control_hidden_states) + hidden_states
    control = three_branches(self, control_hidden_states, encoder_hidden_states, temb, rotary_emb)
    return None if self.proj_out is None else self.proj_out(control), control


_CONTROL_BLOCK = FusedBlock(
    class_path=f"{_HOME}.WanVACETransformerBlock",
    forward=_control_forward,
    what=WHAT,
    known_forwards={"d1d440562bf1e72b-4ababfcc23bcedbdb028e83327bc3858478fb6a8a104f": TRIED},
    parts=PARTS,
    branches=BRANCHES,
)
FUSED_BLOCKS = {_CONTROL_BLOCK.class_path: _CONTROL_BLOCK}
