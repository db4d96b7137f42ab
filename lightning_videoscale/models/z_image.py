"""Z-Image as diffusers has it (`ZImageTransformer2DModel`): its sizes and split plan.

Samples are lists of images and captions of any sizes. The model joins each sample's tokens to one sequence and pads
these to the longest, with a mask. That sequence is split as the stream of all tokens. Blocks in front of it refine the
image's tokens, split as a stream of their own and made whole in between. Those that refine the caption, and the
features of reference images, run whole on every rank: they are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.sliced import sliceable
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.parallel.plan import Rule

_MODEL = "diffusers.models.transformers.transformer_z_image.ZImageTransformer2DModel"

# Images alone. Of a caption its pipeline takes 512 tokens at most, and pads to a multiple of 32, as the model does
# with the image's.
GEOMETRIES = {"z-image": ModelGeometry(temporal_stride=1, text_tokens=512)}


def _sizes(layers: int, width: int) -> TransformerFlops:
    """The MLP has three matrices of a middle of 8/3 of the width, the work of two of 4 times the width."""
    return TransformerFlops(layers, width, 4 * width, cross_attention=False)


TRANSFORMERS = {"z-image": _sizes(30 + 2, 3840)}  # the class's defaults


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    """Blocks that refine image and caption count as so many more, as if these attended to each other there."""
    return _sizes(config["n_layers"] + config["n_refiner_layers"], config["dim"])


FLOPS = {_MODEL: _flops}

_REFINER = "noise_refiner"
BLOCKS = {_MODEL: (f"{_REFINER}.*", "context_refiner.*", "siglip_refiner.*", "layers.*")}

_IMAGE = ("image",)


def _of_blocks(name: str, tokens: Split) -> dict[str, Mapping[str, Rule]]:
    """Of a list of blocks, which are given tables and masks (B, S, ...)."""
    return {f"{name}.0": {"x": tokens}, f"{name}.*": dict.fromkeys(("attn_mask", "freqs_cis", "noise_mask"), tokens)}


def _split_plan(model: nn.Module) -> SplitPlan:
    tokens, image = Split(1), Split(1, _IMAGE)
    refines = [*model.get_submodule(_REFINER).children()] != []
    return SplitPlan(
        inputs={
            "": {"controlnet_block_samples": tokens},
            **(_of_blocks(_REFINER, image) if refines else {}),
            **_of_blocks("layers", tokens),
            "all_final_layer.*": {"noise_mask": tokens},
        },
        outputs={},
        gathers={"all_final_layer.*": {0: tokens}},
        gathers_inside={f"{_REFINER}.-1": {0: image}} if refines else {},
        attention={
            **({f"{_REFINER}.*.attention": Attention(_IMAGE, arguments={"attention_mask": image})} if refines else {}),
            "layers.*.attention": Attention(arguments={"attention_mask": tokens}),
        },
    )


SPLIT_PLANS = {_MODEL: sliceable(_split_plan)}

_ROTATED = Projection(rotary="freqs_cis", layout="complex")
_PROJECTIONS = {f"{_REFINER}.*.attention": {"image": _ROTATED}, "layers.*.attention": {"video": _ROTATED}}

PROJECTIONS = {_MODEL: lambda _: _PROJECTIONS}
