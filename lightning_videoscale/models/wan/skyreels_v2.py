"""SkyReels-V2 as diffusers has it (`SkyReelsV2Transformer3DModel`), for training with and without diffusion forcing.

With diffusion forcing each latent frame has a timestep. The model repeats what it makes of them over a frame's tokens,
(B, 6, S, D) for the blocks and (B, S, D) for the output, which it modulates outside of any module: hence the gather
after the last block. Attention that is causal by blocks of frames (``num_frame_per_block > 1``) is refused, since its
mask differs between queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.norms import TRIED
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.models.wan.block import BRANCHES, PARTS, WHAT, three_branches
from lightning_videoscale.models.wan.fused_attention import SKYREELS_V2, fused_attention
from lightning_videoscale.models.wan.sizes import flops
from lightning_videoscale.models.wan.split import projections
from lightning_videoscale.parallel import Attention, Split, SplitPlan

_MODEL = f"{SKYREELS_V2}.SkyReelsV2Transformer3DModel"

GEOMETRIES = {"skyreels-v2": ModelGeometry()}
# As diffusers' scripts/convert_skyreelsv2_to_diffusers.py has them.
TRANSFORMERS = {
    "skyreels-v2-1.3b": TransformerFlops(30, 1536, 8960),
    "skyreels-v2-14b": TransformerFlops(40, 5120, 13824),
}
FLOPS = {_MODEL: flops}


def _causal(model: Any, _: Mapping[str, Any]) -> str | None:
    if (frames := model.config.num_frame_per_block) <= 1:
        return None
    return (
        f"num_frame_per_block={frames} makes its attention causal by blocks of frames, by a mask that differs between "
        "queries. Set it to 1, for attention of all frames."
    )


def _split_plan(_: Any) -> SplitPlan:
    return SplitPlan(
        inputs={"blocks.0": {"hidden_states": Split(1)}, "blocks.*": {"temb": Split(2, ndim=4)}},
        outputs={"rope": {0: Split(1, keeps_whole=True), 1: Split(1, keeps_whole=True)}},
        gathers={"blocks.-1": {0: Split(1)}},
        attention={"blocks.*.attn1": Attention()},
        objection=_causal,
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {_MODEL: projections}


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Any,
    attention_mask: Tensor | None,
) -> Tensor:
    per_token = temb.transpose(1, 2) if temb.ndim == 4 else temb  # (B, 6, S, D), as Wan's (B, S, 6, D)
    return three_branches(self, hidden_states, encoder_hidden_states, per_token, rotary_emb, attention_mask)


_BLOCK = FusedBlock(
    class_path=f"{SKYREELS_V2}.SkyReelsV2TransformerBlock",
    forward=_forward,
    what=WHAT,
    known_forwards={"6825c2e09e7b8e1c-3be45067ec86b96b67833e6f5b8584d1b44c": TRIED},
    parts=PARTS,
    branches=BRANCHES,
)
FUSED_BLOCKS = {block.class_path: block for block in (_BLOCK, fused_attention(f"{SKYREELS_V2}.SkyReelsV2Attention"))}
