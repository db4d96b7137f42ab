"""EasyAnimate as diffusers has it (`EasyAnimateTransformer3DModel`).

Text and video are streams of their own and attend together, text first. Its first blocks have weights of their own for
the text, and later ones, if there are any, share the video's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import OF_ADDED
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_easyanimate.EasyAnimateTransformer3DModel"

GEOMETRIES = {"easyanimate-v5.1": ModelGeometry(text_tokens=256)}
# The defaults of diffusers' class, which the published weights have.
TRANSFORMERS = {"easyanimate-v5.1-12b": TransformerFlops(48, 3072, 12288, cross_attention=False)}


FLOPS = {_MODEL: partial(TransformerFlops.of_plain, cross_attention=False)}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}


_OF_TEXT = Projection("encoder_hidden_states", **OF_ADDED, output="to_add_out")
_OF_SHARED = Projection("encoder_hidden_states", output="to_add_out")  # which is None: such text has no output at all
_VIDEO = Projection(rotary="image_rotary_emb")


def _projections(model: Any) -> Mapping[str, Mapping[str, Projection]]:
    layers, own = model.config["num_layers"], model.config["mmdit_layers"]
    kinds = [_OF_TEXT if n < own else _OF_SHARED for n in range(layers)]
    alike = {"transformer_blocks.*.attn1": {"text": kinds[0], "video": _VIDEO}}
    each = {f"transformer_blocks.{n}.attn1": {"text": kind, "video": _VIDEO} for n, kind in enumerate(kinds)}
    return each if 0 < own < layers else alike


def _split_plan(model: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1, ("text",))}},
        outputs={"rope_embedding": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={path: Attention(("text", "video")) for path in _projections(model)},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
PROJECTIONS = {_MODEL: _projections}
