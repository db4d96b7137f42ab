"""A video VAE and a text encoder, tiny and of random weights, saved as a pipeline saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from lightning_videoscale.data import GEOMETRIES, OnlineEncoder
from lightning_videoscale.data.encoding.text import TransformersText
from lightning_videoscale.data.encoding.vae import DiffusersVae

MAX_LENGTH = 6


def save_pipeline(folder: Path, width: int = 8) -> Path:
    """Saves both under ``vae``, ``text_encoder`` and ``tokenizer``; the text's embeddings have ``width`` channels."""
    torch.manual_seed(0)
    scales = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 1.0, 2.0, 4.0]}
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scales)
    vae.save_pretrained(folder / "vae")
    config = UMT5Config(vocab_size=16, d_model=width, d_kv=4, d_ff=16, num_layers=2, num_heads=2, pad_token_id=0)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1} | {str(i): i + 2 for i in range(14)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def load_encoder(folder: Path) -> OnlineEncoder:
    """Both, in float32."""
    vae = DiffusersVae(str(folder), GEOMETRIES["wan2.1"], subfolder="vae")
    return OnlineEncoder(vae, TransformersText(str(folder), MAX_LENGTH, dtype=torch.float32))
