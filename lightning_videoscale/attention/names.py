"""The names that ``attention_backend=`` takes."""

from typing import Literal

AttentionBackend = Literal[
    "auto", "sdpa", "cudnn", "flash", "efficient", "math", "flash_attn_2", "flash_attn_3", "flash_attn_4"
]
