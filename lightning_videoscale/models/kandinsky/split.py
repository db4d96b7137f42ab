"""Kandinsky 5's split plan and sizes.

Text passes blocks of its own and then enters the video's by cross-attention, so it stays whole. Rotary tables are made
of frames, rows and columns and become a sequence outside of any module: each block splits its own. The output's layer
takes frames, hence the gather behind the last block.

Rotated queries and keys are rounded to bfloat16 in any dtype; in float32 split and whole agree up to that.

NABLA is refused: its mask is made of means over 64 tokens at a time, and differs between heads and queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Refused, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_kandinsky.Kandinsky5Transformer3DModel"

GEOMETRIES = {"kandinsky-5": ModelGeometry()}
# As the published configurations of Kandinsky 5.0 have them. The blocks of text are left out.
TRANSFORMERS = {
    "kandinsky-5-lite": TransformerFlops(32, 1792, 7168),
    "kandinsky-5-pro": TransformerFlops(60, 4096, 16384),
}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    return TransformerFlops(config["num_visual_blocks"], config["model_dim"], config["ff_dim"])


FLOPS = {_MODEL: _flops}
BLOCKS = {_MODEL: ("text_transformer_blocks.*", "visual_transformer_blocks.*")}


_NABLA = Refused(
    "sparse_params ask for NABLA, whose block-sparse mask looks at 64 tokens of the whole video at a time. Call it "
    "without them, for attention of all tokens."
)


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "": {"sparse_params": _NABLA},
            "visual_transformer_blocks.0": {"visual_embed": Split(1)},
            "visual_transformer_blocks.*": {"rope": Split(1, keeps_whole=True)},
        },
        outputs={},
        gathers={"visual_transformer_blocks.-1": {0: Split(1)}},
        attention={"visual_transformer_blocks.*.self_attention": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_VIDEO = Projection(
    linears=("to_query", "to_key", "to_value"),
    norms=("query_norm", "key_norm"),
    rotary="rotary_emb",
    layout="matrices",
    output="out_layer",
)
PROJECTIONS = {_MODEL: lambda _: {"visual_transformer_blocks.*.self_attention": {"video": _VIDEO}}}
