"""Helios as diffusers has it (`HeliosTransformer3DModel`).

The tokens of its history stand in front of the video's in one sequence. They are a stream of their own, so that each
rank has a share of both: blocks treat them differently, by how many tokens at the end are the video's. Timesteps are of
samples, and the model repeats what it makes of them over all tokens. The output's norm takes the video out again, hence
the gather behind the last block.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.parallel import Attention, Length, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_helios.HeliosTransformer3DModel"

# The defaults of diffusers' class, which the published weights have. A geometry lacks: what the history adds grows with
# the picture.
TRANSFORMERS = {"helios-14b": TransformerFlops(40, 5120, 13824)}
FLOPS = {_MODEL: TransformerFlops.from_config}
BLOCKS = {_MODEL: ("blocks.*",)}

_ALL = ("history", "video")


def _split_plan(_: nn.Module) -> SplitPlan:
    tokens = Split(1, _ALL)
    return SplitPlan(
        inputs={
            "blocks.*": {
                "original_context_length": Length("video"),
                "temb": tokens,
                "rotary_emb": tokens,
            },
            "blocks.0": {"hidden_states": tokens},
        },
        outputs={},
        gathers={"blocks.-1": {0: tokens}},
        attention={"blocks.*.attn1": Attention(_ALL)},
        only_serial="its attention takes the history and the video in one argument, whose streams are not described",
    )


SPLIT_PLANS = {_MODEL: _split_plan}
