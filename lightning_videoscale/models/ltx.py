"""LTX-Video and LTX-2 as diffusers has them (`LTXVideoTransformer3DModel`, `LTX2VideoTransformer3DModel`).

Text enters by cross-attention and stays whole. Timesteps are split before they are embedded, where they are per token:
modulation then is this rank's own, up to the output. LTX-2 has a second stream, audio, with timesteps of its own; video
and audio attend to themselves and to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.injection.attention import (
    Processor,
    Rotary,
    attend_jointly,
    dispatched,
    expanded_mask,
    fused_attention,
    original_if_changed,
    project_out,
    projected,
)
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import modulations
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, RMS_NORM, TRIED
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.kernels import rope_per_pair
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan

_HOME = "diffusers.models.transformers.transformer_ltx"
_LTX = f"{_HOME}.LTXVideoTransformer3DModel"
_LTX2 = "diffusers.models.transformers.transformer_ltx2.LTX2VideoTransformer3DModel"

_PATCHES = ModelGeometry(temporal_stride=8, spatial_stride=32, patch_size=(1, 1, 1))
GEOMETRIES = {"ltx-video": _PATCHES, "ltx-2": _PATCHES}

# Sizes as in diffusers' scripts/convert_ltx_to_diffusers.py and convert_ltx2_to_diffusers.py. Those of LTX-2 are its
# video stream's: a clip has some 25 audio tokens a second, half as wide.
TRANSFORMERS = {"ltx-video": TransformerFlops(28, 2048, 8192), "ltx-2": TransformerFlops(48, 4096, 16384)}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return TransformerFlops(config["num_layers"], width, 4 * width)


FLOPS = {_LTX: _flops, _LTX2: _flops}

BLOCKS = {_LTX: ("transformer_blocks.*",), _LTX2: ("transformer_blocks.*",)}


def _per_token(*streams: str) -> Split:
    """Of timesteps (B, S), of (B, 1), which are per sample as those of (B,) are."""
    return Split(1, streams, ndim=2, broadcasts=True)


def _ltx_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={"": {"timestep": _per_token("video")}, "transformer_blocks.0": {"hidden_states": Split(1)}},
        outputs={"rope": {0: Split(1), 1: Split(1)}},
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
    )


SPLIT_PLANS = {_LTX: _ltx_plan, _LTX2: _ltx2_plan}


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


_PROCESSOR = Processor(
    class_path=f"{_HOME}.LTXVideoAttnProcessor",
    known_calls={"f5a5a3aba9f4ff86-240e2af49f19a0370aa5a1246952435b54dcd016b445e7f7aa2e1644c": TRIED},
    norms=(RMS_NORM,),
    helpers={f"{_HOME}.apply_rotary_emb": "04b82877ae225456-30aefc2614d9b45b69"},
)


def _attend(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Rotary = None,
    **kwargs: Any,
) -> Tensor:
    if (original := original_if_changed(self, _PROCESSOR, as_before=bool(kwargs.keys() - {"detach_bias"}))) is not None:
        unchanged: Tensor = original(
            hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb=image_rotary_emb, **kwargs
        )
        return unchanged
    rope = None
    if image_rotary_emb is not None:  # (B, S, D), another entry for each head
        cos, sin = (table.unflatten(-1, (self.heads, -1)) for table in image_rotary_emb)
        rope = rope_per_pair(cos, sin, "interleaved")
    stream = projected(self, hidden_states, encoder_hidden_states, per_head=False, rope=rope)
    mask = expanded_mask(self, attention_mask, stream.values)
    attended = attend_jointly(self, [stream], partial(dispatched, self.processor, mask=mask))
    return project_out(self, attended, detach_bias=kwargs.get("detach_bias", False))


def _forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Rotary = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    per_token = temb.unflatten(-1, (6, -1))
    attention, feed_forward = modulations(self.scale_shift_table, per_token, hidden_states.shape[0])
    stream = ResidualStream(self, hidden_states, rounding="eager")
    stream.branch(self.attn1, self.norm1, attention, image_rotary_emb=image_rotary_emb)
    of_text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
    stream.branch(self.attn2, None, None, **of_text)
    stream.branch(self.ff, self.norm2, feed_forward)
    return stream.end()


_BLOCK = FusedBlock(
    class_path=f"{_HOME}.LTXVideoTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual (2), gate_residual_norm_modulate",
    known_forwards={"63a7d842c69054ad-6f61668588408f6cd5cd8ffc9693503cbc241b40f844c": TRIED},
    parts=(Part("norm1", DIFFUSERS_RMS_NORM), Part("norm2", DIFFUSERS_RMS_NORM)),
    branches=("attn1", "attn2", "ff"),
)
_ATTENTION = fused_attention(
    _PROCESSOR, _attend, f"{_HOME}.LTXAttention", {"355cd3386e01bd09-189bb21a3f2ec6c9fa": TRIED}
)
FUSED_BLOCKS = {block.class_path: block for block in (_BLOCK, _ATTENTION)}
