"""With which settings each family has a mask of keys, timesteps of tokens, or an image that it starts from.

A family that is not named has no such thing. That is tried, too: its forward must have no such argument, or raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Shown:
    """Settings of a family with which it is shown, and a remark for the page."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True)
class Refused:
    """Arguments with which a call of the split model is an error that says why."""

    arguments: Mapping[str, Any]


Condition = Shown | Refused

TEXT = "of the text's tokens, to which the video attends"

KEY_MASKS: Mapping[str, Condition] = {
    "allegro": Shown(remark=TEXT),
    "chroma": Shown(),
    "cogview4": Refused({"attention_mask": torch.ones(2, 7)}),
    "cosmos": Shown({"masked": True}, TEXT),
    "hunyuan_video": Shown(),
    "hunyuan_video_15": Shown(),
    "hunyuan_video_framepack": Shown(),
    "ltx": Shown(remark=TEXT),
    "ltx2": Shown(remark=TEXT),
    "mochi": Shown(remark="padding behind the text's tokens; diffusers cuts it out before it attends"),
    "motif_video": Shown({"image": 5}),
    "own_model": Shown(),
    "pixart": Shown(remark=TEXT),
    "qwen_image": Shown({"controlled": 1}),
    "z_image": Shown(remark="made by the model, which pads a list of samples"),
}

TIMESTEPS: Mapping[str, Condition] = {
    "anyflow": Shown(remark="one for each frame"),
    "chronoedit": Shown({"timesteps": "token"}),
    "cosmos": Shown({"learned": False, "per_frame": True}, "one for each frame"),
    "helios": Shown(remark="the history has its own"),
    "hunyuan_video": Shown({"condition": "token_replace"}, "the given first frame has its own"),
    "ltx": Shown({"times": "token"}),
    "ltx2": Shown({"version": "2.3", "rope": "split", "times": "token", "audio_times": "token"}),
    "minimax_h3": Shown({"rotated": 2, "given": 4}, "each token names one of a list"),
    "qwen_image": Shown({"edits": True}, "references have their own"),
    "skyreels_v2": Shown({"timesteps": "frame"}, "one for each frame"),
    "wan": Shown({"timesteps": "token"}),
    "z_image": Shown({"omni": True}, "images that are given have their own"),
}

FIRST_TOKENS = "given frames are tokens with a timestep of their own"
REFERENCES = "references are tokens beside those of the image"
CONTROL = "residuals of a ControlNet"

IMAGES: Mapping[str, Condition] = {
    "anyflow": Shown({"image": True, "delta": "t-r"}),
    "chroma": Shown({"masked": False, "controlled": True}, CONTROL),
    "chronoedit": Shown({"image": True}),
    "cogvideox": Shown({"patch_frames": 2, "offset": True}, "as channels"),
    "consisid": Shown(remark="a face"),
    "cosmos": Shown({"learned": False, "per_frame": True, "image": True, "control": True}),
    "easyanimate": Shown({"second": True}),
    "flux": Shown({"controlled": (2, 1)}, f"{REFERENCES}; {CONTROL}"),
    "flux2": Shown(remark=REFERENCES),
    "helios": Shown(remark="history of frames"),
    "hunyuan_video": Shown({"condition": "token_replace"}),
    "hunyuan_video_15": Shown({"image": True}),
    "hunyuan_video_framepack": Shown(remark="an image, and history of frames"),
    "kandinsky": Shown({"condition": True}),
    "ltx": Shown({"times": "token"}, FIRST_TOKENS),
    "ltx2": Shown({"version": "2.5", "times": "token", "audio_times": "token"}, FIRST_TOKENS),
    "minimax_h3": Shown({"rotated": 2, "given": 4}, FIRST_TOKENS),
    "motif_video": Shown({"image": 5}),
    "qwen_image": Shown({"edits": True, "controlled": 1}, f"{REFERENCES}; {CONTROL}"),
    "sd3": Shown({"norm": "rms_norm", "controlled": 2}, CONTROL),
    "skyreels_v2": Shown({"image": True}),
    "wan": Shown({"image": True}),
    "wan_animate": Shown({"image": True}),
    "wan_vace": Shown({"image": True, "scales": True, "shorter": True}),
    "z_image": Shown({"omni": True}, REFERENCES),
}
