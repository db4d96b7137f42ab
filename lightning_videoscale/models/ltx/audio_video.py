"""The fused block of LTX-2: two residual streams, of video and of audio, that also attend to each other.

All is rounded after every operation, as diffusers' code does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.injection.branch_bias import branch_and_bias
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.modulation import Modulation, modulations
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM
from lightning_videoscale.injection.parts import Part
from lightning_videoscale.injection.residual_stream import ResidualStream
from lightning_videoscale.models.ltx.audio_video_attention import HOME

_Given = Mapping[str, Any]

_CROSSING = (
    ("audio_to_video_attn", "a2v_cross_attention_mask", "use_a2v_cross_attention"),
    ("video_to_audio_attn", "v2a_cross_attention_mask", "use_v2a_cross_attention"),
)
"""Where the streams attend to each other: the attention, its mask, and whether it is wanted. Video asks, then audio."""


def _forward(self: Any, given: _Given) -> tuple[Tensor, Tensor]:
    stream = partial(ResidualStream, self, rounding="eager")
    video, audio = stream(given["hidden_states"]), stream(given["audio_hidden_states"])
    of_video, of_audio = _own(self, given, ""), _own(self, given, "audio_")
    _attend_to_itself_and_text(self, video, of_video, given, "")
    _attend_to_itself_and_text(self, audio, of_audio, given, "audio_")
    _attend_to_each_other(self, video, audio, given)
    video.branch(self.ff, self.norm3, of_video[1])
    audio.branch(self.audio_ff, self.audio_norm3, of_audio[1])
    return video.end(), audio.end()


def _own(block: Any, given: _Given, stream: str) -> tuple[Modulation, ...]:
    """Of the attention to itself, of the feed-forward and, if that is modulated, of the attention to text."""
    table, temb = getattr(block, f"{stream}scale_shift_table"), given["temb_audio" if stream else "temb"]
    return modulations(table, temb.unflatten(-1, (len(table), -1)), len(temb))


def _attend_to_itself_and_text(
    block: Any, stream: ResidualStream, own: tuple[Modulation, ...], given: _Given, name: str
) -> None:
    perturbation = ("perturbation_mask", "all_perturbed") if block.perturbed_attn else ()
    stream.branch(
        getattr(block, f"{name}attn1"),
        getattr(block, f"{name}norm1"),
        own[0],
        by_name="hidden_states",
        encoder_hidden_states=None,
        query_rotary_emb=given[f"{name or 'video_'}rotary_emb"],
        attention_mask=given[f"{name}self_attention_mask"],
        **{each: given[each] for each in perturbation},
    )
    stream.branch(
        getattr(block, f"{name}attn2"),
        getattr(block, f"{name}norm2"),
        own[2] if len(own) == 3 else None,
        encoder_hidden_states=_text(block, given, name, own[0].dtype),
        query_rotary_emb=None,
        attention_mask=given[f"{name}encoder_attention_mask"],
    )


def _text(block: Any, given: _Given, stream: str, dtype: torch.dtype) -> Any:
    """What the stream, after a branch with a gate of this dtype, attends to."""
    text: Any = given[f"{stream}encoder_hidden_states"]
    if not block.cross_attn_adaln:
        return text
    table = getattr(block, f"{stream}prompt_scale_shift_table")
    if (temb := given["temb_prompt_audio" if stream else "temb_prompt"]) is None:
        x = given[f"{stream}hidden_states"]
        static = table[None, None].to(device=x.device, dtype=torch.promote_types(x.dtype, dtype))
        shift, scale = static.unbind(dim=2)
    else:
        shift, scale = block.get_mod_params(table, temb, len(text))
    return text * (1 + scale) + shift


class _Side(NamedTuple):
    """One of two streams that attend to each other, and what an attention reads of it."""

    stream: ResidualStream
    modulation: Modulation
    rotary: Any
    y: Tensor
    recomputed: AbstractContextManager[None]


def _attend_to_each_other(block: Any, video: ResidualStream, audio: ResidualStream, given: _Given) -> None:
    """Both attentions read the streams as these are before either."""
    tables = block.video_a2v_cross_attn_scale_shift_table, block.audio_a2v_cross_attn_scale_shift_table
    of_video = block.audio_to_video_norm, given["ca_video_rotary_emb"], _of_crossing(tables[0], given, "")
    of_audio = block.video_to_audio_norm, given["ca_audio_rotary_emb"], _of_crossing(tables[1], given, "audio_")
    calls = []
    for place, (attention, mask, wanted) in enumerate(_CROSSING):
        if given[wanted]:
            sides = _side(video, place, *of_video), _side(audio, place, *of_audio)
            calls.append((getattr(block, attention), given[mask], sides[place], sides[1 - place]))
    for attn, mask, asking, asked in calls:
        with asking.recomputed, asked.recomputed:
            output, bias = branch_and_bias(
                attn,
                asking.y,
                encoder_hidden_states=asked.y,
                query_rotary_emb=asking.rotary,
                key_rotary_emb=asked.rotary,
                attention_mask=mask,
            )
        asking.stream.add(output, asking.modulation, bias)


def _side(stream: ResidualStream, place: int, norm: Any, rotary: Any, modulations: Sequence[Modulation]) -> _Side:
    y = stream.norm(norm, modulations[place])
    return _Side(stream, modulations[place], rotary, y, stream.recomputed(y))


def _of_crossing(table: Tensor, given: _Given, stream: str) -> list[Modulation]:
    """Of video's attention to audio and of audio's to video; the gate is for the one where the stream asks."""
    *own, own_gate = table.unbind(0)
    parts = given[f"temb_ca_{stream}scale_shift"].unflatten(-1, (4, -1)).unbind(2)
    gate = given[f"temb_ca_{stream}gate"]
    return [Modulation(parts[i + 1], parts[i], gate, own[i + 1], own[i], own_gate) for i in (0, 2)]


_NORMS = ("norm1", "norm2", "norm3")
_NORMS_OF_AUDIO = ("audio_norm1", "audio_norm2", "audio_norm3", "audio_to_video_norm", "video_to_audio_norm")
_BRANCHES = ("attn1", "attn2", "ff", "audio_attn1", "audio_attn2", "audio_ff", *(attn for attn, *_ in _CROSSING))

_BLOCK = FusedBlock(
    class_path=f"{HOME}.LTX2VideoTransformerBlock",
    forward=_forward,
    what="fork_norm_modulate, gate_residual_norm_modulate, gate_residual of video and audio",
    known_forwards={
        "d8183eb2c10fa4ee-a0c1666fff745d0858cd81286dbe2a969cc338f7145bbb74484cd2003db33f86a9fa7acd53e8903cb3b0f8fd7ae"
        "751e8826b2ef451b40f8346ec55bbdf5": "diffusers 0.38 and 0.39",
        "8a178f08f13b4021-a0c1666fff745d0858cd81286dbe2a969cc338f7145bbb74484cd2003db35f26a9fa7acd53e8903cb3b0f8fd7ae"
        "751e8826b2ef451b40f8346ec55bbdf5": "diffusers 0.40 to 0.42.1",
    },
    helpers={"LTX2VideoTransformerBlock.get_mod_params": "e8d7af0fa992bba0-2f9ac40ccdc6414"},
    parts=tuple(Part(name, DIFFUSERS_RMS_NORM) for name in (*_NORMS, *_NORMS_OF_AUDIO)),
    branches=_BRANCHES,
    gathers=True,
)
FUSED_BLOCKS = {_BLOCK.class_path: _BLOCK}
