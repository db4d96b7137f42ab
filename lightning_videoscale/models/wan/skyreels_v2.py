"""SkyReels-V2 as diffusers has it (`SkyReelsV2Transformer3DModel`), for training with and without diffusion forcing.

With diffusion forcing each latent frame has a timestep. The model repeats what it makes of them over a frame's tokens,
(B, 6, S, D) for the blocks and (B, S, D) for the output, which it modulates outside of any module: hence the gather
after the last block. Attention that is causal by blocks of frames (``num_frame_per_block > 1``) is refused, since its
mask differs between queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.wan.sizes import flops
from lightning_videoscale.models.wan.split import projections
from lightning_videoscale.parallel import Attention, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_skyreels_v2.SkyReelsV2Transformer3DModel"

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
        outputs={"rope": {0: Split(1), 1: Split(1)}},
        gathers={"blocks.-1": {0: Split(1)}},
        attention={"blocks.*.attn1": Attention()},
        objection=_causal,
    )


SPLIT_PLANS = {_MODEL: _split_plan}
PROJECTIONS = {_MODEL: projections}
