"""Split plans and sizes of LTX-Video and LTX-2.

Text enters by cross-attention and stays whole. Timesteps are split before they are embedded, where they are per token:
modulation then is this rank's own, up to the output. LTX-2 has a second stream, audio, with timesteps of its own; video
and audio attend to themselves and to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_LTX = "diffusers.models.transformers.transformer_ltx.LTXVideoTransformer3DModel"
_LTX2 = "diffusers.models.transformers.transformer_ltx2.LTX2VideoTransformer3DModel"

_PATCHES = ModelGeometry(temporal_stride=8, spatial_stride=32, patch_size=(1, 1, 1))
GEOMETRIES = {"ltx-video": _PATCHES, "ltx-2": _PATCHES}

# Sizes as in diffusers' scripts/convert_ltx_to_diffusers.py and convert_ltx2_to_diffusers.py. Those of LTX-2 are its
# video stream's: a clip has some 25 audio tokens a second, half as wide.
TRANSFORMERS = {"ltx-video": TransformerFlops(28, 2048, 8192), "ltx-2": TransformerFlops(48, 4096, 16384)}


FLOPS = dict.fromkeys((_LTX, _LTX2), partial(TransformerFlops.of_plain, cross_attention=True))

BLOCKS = {_LTX: ("transformer_blocks.*",), _LTX2: ("transformer_blocks.*",)}


def _per_token(*streams: str) -> Split:
    """Of timesteps (B, S), of (B, 1), which are per sample as those of (B,) are."""
    return Split(1, streams, ndim=2, broadcasts=True)


def _ltx_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {"timestep": _per_token("video")}, "transformer_blocks.0": {"hidden_states": Split(1)}},
        outputs={"rope": {0: Split(1, keeps_whole=True), 1: Split(1, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={"transformer_blocks.*.attn1": Attention()},
    )


def _ltx2_plan(model: nn.Module) -> SplitPlan:
    video, audio = ("video",), ("audio",)
    tokens = 2 if model.config["rope_type"] == "split" else 1  # type: ignore[index]  # (B, H, S, D) and (B, S, H · D)
    tables = {stream: {0: Split(tokens, stream), 1: Split(tokens, stream)} for stream in (video, audio)}
    return SplitPlan(
        inputs={
            "": {"timestep": _per_token("video"), "audio_timestep": _per_token("audio")},
            "transformer_blocks.0": {"hidden_states": Split(1), "audio_hidden_states": Split(1, audio)},
        },
        outputs={
            "rope": tables[video],
            "cross_attn_rope": tables[video],
            "audio_rope": tables[audio],
            "cross_attn_audio_rope": tables[audio],
        },
        gathers={"proj_out": {0: Split(1)}, "audio_proj_out": {0: Split(1, audio)}},
        attention={
            "transformer_blocks.*.attn1": Attention(),
            "transformer_blocks.*.audio_attn1": Attention(audio),
            "transformer_blocks.*.audio_to_video_attn": Attention(video, audio),
            "transformer_blocks.*.video_to_audio_attn": Attention(audio, video),
        },
        only_serial="its video and its audio ask each other, so that queries and keys are of different streams",
    )


SPLIT_PLANS = {_LTX: with_hidden_exchange(_ltx_plan), _LTX2: _ltx2_plan}


def _ltx_projections(_: nn.Module) -> Mapping[str, Mapping[str, Projection]]:
    return {
        "transformer_blocks.*.attn1": {"video": Projection(across_heads=True, rotary="image_rotary_emb", layout="bsc")}
    }


def _ltx2_projections(model: nn.Module) -> Mapping[str, Mapping[str, Projection]]:
    halves = model.config["rope_type"] == "split"  # type: ignore[index]
    made = partial(Projection, across_heads=True, layout="bhsd" if halves else "bsc", halves=halves)
    own = made(rotary="query_rotary_emb")
    asking = made(linears=("to_q", None, None), rotary="query_rotary_emb")
    asked = made("encoder_hidden_states", (None, "to_k", "to_v"), rotary="key_rotary_emb")
    return {
        "transformer_blocks.*.attn1": {"video": own},
        "transformer_blocks.*.audio_attn1": {"audio": own},
        "transformer_blocks.*.audio_to_video_attn": {"video": asking, "audio": asked},
        "transformer_blocks.*.video_to_audio_attn": {"audio": asking, "video": asked},
    }


PROJECTIONS = {_LTX: _ltx_projections, _LTX2: _ltx2_projections}
