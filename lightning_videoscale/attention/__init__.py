"""Attention on one device: the kernels that are installed, and which of them computes a call.

`AttentionChoices`    chooses, for a whole run; `AttentionBackend` are the names that it takes
`attention`           by the kernel that was chosen
`open_mask`           a mask without samples of which no key may be attended
`KERNELS`             all kernels, by name
"""

from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.choices import AttentionChoices, as_choices
from lightning_videoscale.attention.dispatch import as_autocast, attention
from lightning_videoscale.attention.masks import open_mask
from lightning_videoscale.attention.names import AttentionBackend

__all__ = ["KERNELS", "AttentionBackend", "AttentionChoices", "as_autocast", "as_choices", "attention", "open_mask"]
