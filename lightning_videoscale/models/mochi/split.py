"""Mochi's split plan, sizes, and the attention that exchanges.

Text and video are streams of their own and attend together, video first; the last block drops the text. diffusers
attends sample by sample, to cut out the text's padding. Here all samples attend at once, and padding is masked. What
comes out for padding is zero in both.

diffusers moves a sample's text together before it attends, and not what comes out. So text that is padded elsewhere
than behind is refused: its tokens would receive each other's attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.attention import OF_ADDED
from lightning_videoscale.models.hidden_exchange import with_hidden_exchange
from lightning_videoscale.parallel import Attention, Projection, Split, SplitPlan
from lightning_videoscale.undo import Undo

_MODEL = "diffusers.models.transformers.transformer_mochi.MochiTransformer3DModel"
PROCESSOR = "diffusers.models.attention_processor.MochiAttnProcessor2_0"

GEOMETRIES = {"mochi": ModelGeometry(temporal_stride=6, text_tokens=256)}
# The defaults of diffusers' class, which the published weights have. Its gated feed-forward has three matrices of
# 4·D·2/3, as many numbers as two of 4·D. The text is half as wide as the video, and counts as if it were not.
TRANSFORMERS = {"mochi-1": TransformerFlops(48, 3072, 12288, cross_attention=False)}


def _flops(config: Mapping[str, Any]) -> TransformerFlops:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return TransformerFlops(config["num_layers"], width, 3 * (8 * width // 3) // 2, cross_attention=False)


FLOPS = {_MODEL: _flops}
BLOCKS = {_MODEL: ("transformer_blocks.*",)}

Tables = tuple[Tensor, Tensor]


class OneCallProcessor:
    """Attends as diffusers' processor of Mochi, by one call for all samples."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: Tables | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attends over video (B, s, D) and text (B, t, E), of which the mask (B, t) says what counts."""
        video = [linear(hidden_states) for linear in (attn.to_q, attn.to_k, attn.to_v)]
        text = [linear(encoder_hidden_states) for linear in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in video)
        text_query, text_key, text_value = (x.unflatten(2, (attn.heads, -1)) for x in text)
        query, key = (rotated(x, image_rotary_emb) for x in (attn.norm_q(query), attn.norm_k(key)))
        pairs = (query, attn.norm_added_q(text_query)), (key, attn.norm_added_k(text_key)), (value, text_value)
        q, k, v = (torch.cat(pair, 1) for pair in pairs)
        out = attend_in_one_call(q, k, v, attention_mask).flatten(2)
        out_video, out_text = out.split([query.shape[1], attention_mask.shape[1]], 1)
        for layer in attn.to_out:
            out_video = layer(out_video)
        return out_video, attn.to_add_out(out_text) if hasattr(attn, "to_add_out") else out_text


def attend_in_one_call(query: Tensor, key: Tensor, value: Tensor, text_mask: Tensor) -> Tensor:
    """Attends over video and the text (B, t) that counts, by one call; (B, s + t, H, D/H) in and out.

    What comes out for padding is zero.
    """
    counts = F.pad(text_mask.bool(), (query.shape[1] - text_mask.shape[1], 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, counts[:, None, None])
    return attended.transpose(1, 2) * counts[..., None, None]


def rotated(x: Tensor, tables: Tables | None) -> Tensor:
    """Of (B, s, H, D) by tables (s, H, D / 2): each head has its own."""
    if tables is None:
        return x
    cos, sin = tables
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = even * cos - odd * sin, even * sin + odd * cos
    return torch.stack([half.to(x.dtype) for half in turned], -1).flatten(-2)


def _attend_in_one_call(module: Any) -> Undo:
    if class_path(type(module.processor)) != PROCESSOR:
        raise ValueError(
            f"The model's attention has the processor {type(module.processor).__name__}, whose computation is unknown "
            "here; sequence parallelism replaces only diffusers' own MochiAttnProcessor2_0."
        )
    undo = Undo(partial(setattr, module, "processor", module.processor))
    module.processor = OneCallProcessor()
    return undo


def _padded_in_between(_: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    counts = arguments["encoder_attention_mask"].bool()
    if bool((counts[:, 1:] & ~counts[:, :-1]).any()):  # waits for the device, as diffusers does in each block
        return "encoder_attention_mask has text behind padding. Pad text behind its last token."
    return None


_JOINT, _TEXT = ("video", "text"), Split(1, ("text",))


def _split_plan(_: nn.Module) -> SplitPlan:
    return SplitPlan(
        inputs={
            "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": _TEXT},
            "transformer_blocks.*": {"encoder_attention_mask": _TEXT},
        },
        outputs={"rope": {0: Split(0, keeps_whole=True), 1: Split(0, keeps_whole=True)}},
        gathers={"proj_out": {0: Split(1)}},
        attention={
            "transformer_blocks.*.attn1": Attention(
                _JOINT, padded_rows=True, arguments={"attention_mask": _TEXT}, in_one_call=_attend_in_one_call
            )
        },
        objection=_padded_in_between,
    )


SPLIT_PLANS = {_MODEL: with_hidden_exchange(_split_plan)}

_OF_TEXT = Projection("encoder_hidden_states", **OF_ADDED, output="to_add_out")
_STREAMS = {"video": Projection(rotary="image_rotary_emb", layout="shd"), "text": _OF_TEXT}
PROJECTIONS = {_MODEL: lambda _: {"transformer_blocks.*.attn1": _STREAMS}}
