"""A text encoder of transformers: captions in, the embeddings that a model attends to out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class EncodedText(NamedTuple):
    """What a text encoder makes of B captions.

    Attributes:
        embeds: (B, L, D), zero behind the end of a caption.
        mask: (B, L), bool, True where a caption has a token.
    """

    embeds: Tensor
    mask: Tensor


class TransformersText:
    """Encodes captions with a tokenizer and an encoder (T5, UMT5, CLIP, BERT) of transformers.

    Captions are taken as they are, cut or filled up to ``max_length`` tokens. What fills them up is zero in the result,
    as Wan is trained.

    Args:
        name: Folder of a saved pipeline, or its name on the Hugging Face Hub. Weights are read from safetensors only.
        max_length: Tokens L.
        subfolder: Folder of the encoder within ``name``.
        tokenizer: Folder of the tokenizer within ``name``.
        dtype: Floating-point type to encode in, and of the embeddings.

    Attributes:
        name: As given.
        max_length: As given.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        OSError: If there is no such encoder or tokenizer.
    """

    def __init__(
        self,
        name: str,
        max_length: int = 512,
        subfolder: str = "text_encoder",
        tokenizer: str = "tokenizer",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        try:
            from transformers import AutoModelForTextEncoding, AutoTokenizer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Encoding captions needs transformers: pip install 'lightning-videoscale[text]'."
            ) from error
        self.name, self.max_length = name, max_length
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name, subfolder=tokenizer)
        model = AutoModelForTextEncoding.from_pretrained(name, subfolder=subfolder, dtype=dtype, use_safetensors=True)
        self._model: Any = model.eval().requires_grad_(False)

    def to(self, device: torch.device) -> None:
        """Encodes there from now on."""
        self._model.to(device)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> EncodedText:
        """Encodes B captions; the result lies on the encoder's device."""
        tokens = self._tokenizer(
            list(captions), padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        ).to(self._model.device)
        mask: Tensor = tokens.attention_mask.bool()
        embeds: Tensor = self._model(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        return EncodedText(embeds.masked_fill(~mask[..., None], 0), mask)
