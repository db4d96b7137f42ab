"""MiniMax-H3 as diffusers has it (`MiniMaxH3Transformer3DModel`).

Text, video and audio are scattered into one packed sequence, which is one stream here. A row's modulation is read by
index, of its timestep and its modality. Both outputs are computed for all rows and gathered, as rows are picked then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_MODEL = "diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3Transformer3DModel"


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    """Its attention is wider than a token and its feed-forward gated; returned is what costs the same without."""
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["attention_head_dim"]
    per_token = 8 * hidden * inner + 6 * hidden * config["ffn_dim"]
    ffn_width = (per_token - 8 * inner**2) // (4 * inner)
    return TransformerFlops(config["num_layers"], inner, ffn_width, cross_attention=False)


FLOPS = {_MODEL: _flops}
# The defaults of diffusers' class, which the published weights have. A geometry lacks: how many rows are audio and
# text, their caller decides.
TRANSFORMERS = {"minimax-h3": TransformerFlops(50, 7168, 12544, cross_attention=False)}
BLOCKS = {_MODEL: ("token_refiner.refiner_blocks.*", "transformer_blocks.*")}


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "transformer_blocks.0": {"hidden_states": Split(1)},
            "transformer_blocks.*": {"adaln_indices": Split(0)},
            "norm_out": {"timestep_indices": Split(0)},
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}, "audio_proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn": Attention()},
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}
_VIDEO = Projection(rotary="rotary_emb", halves=True, joined="to_qkv")
PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn": {"video": _VIDEO}}}
