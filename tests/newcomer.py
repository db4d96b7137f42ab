"""A newcomer's folder: ten videos, their captions, and a small pipeline under the name of the one that pages load."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from tests.data.encoders import save_pipeline
from tests.data.films import film, numbered

MODEL = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"  # found in the working directory before the Hub is asked


def make_newcomers_folder(folder: Path) -> Path:
    parts = save_pipeline(folder / "parts")
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 32}
    WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(parts / "text_encoder"),
        vae=AutoencoderKLWan.from_pretrained(parts / "vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(in_channels=4, out_channels=4, text_dim=8, freq_dim=16, **size),
    ).save_pretrained(folder / MODEL)
    (folder / "videos").mkdir()
    for number in range(10):
        data = film([numbered(number + k, 32, 48) for k in range(9)])
        (folder / "videos" / f"{number}.mp4").write_bytes(data)
    captions = "\n".join(f"{number}.mp4,{number} {number}" for number in range(10))
    (folder / "captions.csv").write_text(f"file,caption\n{captions}\n")
    return folder


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def commands(page: str) -> list[str]:
    """The lines of the blocks without a language."""
    return [line for block in blocks(page, "") for line in block.splitlines()]


def replaced(text: str, changes: dict[str, str]) -> str:
    """The text with smaller numbers; each must be there."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text
