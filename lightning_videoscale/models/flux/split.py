"""Flux.1 as diffusers has it (`FluxTransformer2DModel`): its sizes and split plan.

Text and image are streams of their own in the first blocks and attend together, text first. The later blocks join them
while they run. Everything is token by token from the start, so the inputs are split, positions included; the rotary
tables are made of a rank's own. What a ControlNet adds between blocks is of the image's tokens.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import OF_ADDED
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_flux.FluxTransformer2DModel"

JOINT, TEXT = ("text", "video"), Split(1, ("text",))
DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"

GEOMETRIES = {"flux": ModelGeometry(temporal_stride=1, text_tokens=512)}  # images alone; text as the pipelines pad it
TRANSFORMERS = {"flux": TransformerFlops(19 + 38, 3072, 12288, cross_attention=False)}  # the class's defaults
FLOPS = {_MODEL: TransformerFlops.from_config}  # both kinds of blocks cost the same, token by token
BLOCKS = {_MODEL: (f"{DOUBLE}.*", f"{SINGLE}.*")}

TOKENS = {
    "hidden_states": Split(1),
    "encoder_hidden_states": TEXT,
    "img_ids": Split(-2),  # (S, axes), or (B, S, axes) as earlier versions took them
    "txt_ids": Split(-2, ("text",)),
}
"""Arguments of the network, of Flux's kin, too."""

CONTROL = {"controlnet_block_samples": Split(1), "controlnet_single_block_samples": Split(1)}
"""What a ControlNet adds behind blocks."""


def joint_attention(model: nn.Module, *, padded_rows: bool = False) -> dict[str, Attention]:
    """Returns the attention of those lists of blocks that have any."""
    lists = [name for name in (DOUBLE, SINGLE) if [*model.get_submodule(name).children()]]
    return {
        f"{name}.*.attn": Attention(JOINT, padded_rows=padded_rows, arguments={"attention_mask": Split(3, JOINT)})
        for name in lists
    }


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {**TOKENS, **CONTROL}},
        outputs={},
        gathers={"proj_out": {0: Split(1)}},
        attention=joint_attention(model),
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

OF_DOUBLE = {
    "text": Projection(
        "encoder_hidden_states",
        **OF_ADDED,
        rotary="image_rotary_emb",
        rotary_of=JOINT,
        joined="to_added_qkv",
        output="to_add_out",
    ),
    "video": Projection(rotary="image_rotary_emb", rotary_of=JOINT, joined="to_qkv"),
}
"""The streams of attention in the first blocks, of Flux's kin, too."""

_OF_SINGLE = Projection(tokens_of=JOINT, rotary="image_rotary_emb", rotary_of=JOINT, joined="to_qkv")
OF_BLOCKS = {f"{DOUBLE}.*.attn": OF_DOUBLE, f"{SINGLE}.*.attn": dict.fromkeys(JOINT, _OF_SINGLE)}
"""The same of all blocks, of Chroma's, too."""

PROJECTIONS = {_MODEL: lambda _: OF_BLOCKS}
