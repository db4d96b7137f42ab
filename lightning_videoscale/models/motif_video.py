"""Motif-Video as diffusers has it (`MotifVideoTransformer3DModel`).

Video, an image's tokens and text attend together, in this order, and image and text are one tensor. Blocks may have
video attend to the text once more, without the image. Decoder blocks, the last ones if there are any, take the patches
again and attend together with what the blocks before have made of them: both have the video's tokens.
"""

from __future__ import annotations

from typing import Any

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.parallel import Attention, Length, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_MODEL = "diffusers.models.transformers.transformer_motif_video.MotifVideoTransformer3DModel"

GEOMETRIES = {"motif-video": ModelGeometry(text_tokens=512)}

# Decoder blocks, whose sequence is twice the video, and attention to text alone count as plain joint blocks.
FLOPS = {_MODEL: TransformerFlops.from_config}
_DOUBLE, _SINGLE = "transformer_blocks", "single_transformer_blocks"
BLOCKS = {_MODEL: (f"{_DOUBLE}.*", f"{_SINGLE}.*")}

_JOINT, _OF_TEXT = ("video", "image", "text"), ("image", "text")


def _split_plan(model: Any) -> SplitPlan:
    decoders = model.config["num_decoder_layers"]
    singles = len(model.single_transformer_blocks)
    lists = [name for name in (_DOUBLE, _SINGLE) if len(model.get_submodule(name))]
    inputs: dict[str, dict[str, Rule]] = {
        f"{name}.*": {"image_embed_seq_len": Length("image"), "attention_mask": Split(3, _JOINT)} for name in lists
    }
    inputs[f"{lists[0]}.0"] = {"hidden_states": Split(1), "encoder_hidden_states": Split(1, _OF_TEXT)}
    attention = {f"{name}.*.attn": Attention(_JOINT) for name in lists}
    if decoders:
        inputs[f"{_SINGLE}.{singles - decoders}"] = {"hidden_states": Split(1)}
        del attention[f"{_SINGLE}.*.attn"]
        for n in range(singles):
            together = _JOINT if n < singles - decoders else ("video", "video")
            attention[f"{_SINGLE}.{n}.attn"] = Attention(together)
    for name, own in ((_DOUBLE, "enable_text_cross_attention_dual"), (_SINGLE, "enable_text_cross_attention_single")):
        if name in lists and model.config[own] and (name == _DOUBLE or singles > decoders):
            attention[f"{name}.*.cross_attn"] = Attention(("video",), ("text",))
    return SplitPlan(
        inputs=inputs,
        outputs={"rope": {0: Split(0), 1: Split(0)}},
        gathers={"proj_out": {0: Split(1)}},
        attention=attention,
        only_serial="its attention takes text and video in one argument, whose streams are not described",
    )


SPLIT_PLANS = {_MODEL: _split_plan}
