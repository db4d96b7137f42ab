"""How CUDA's memory is allocated."""

from __future__ import annotations

import os

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.torch import TORCH

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments() -> bool:
    """Lets segments of memory grow from now on, and says whether it did: who has set anything is left alone.

    With segments of fixed sizes, micro-batches of ever other sizes leave gaps that none of the next fits into. Only the
    environment is public, and it is read when the first tensor is made.
    """
    if any(os.environ.get(name) for name in _SETTINGS) or _set_in_this_process():
        return False
    TORCH.get("torch._C", "_accelerator_setAllocatorSettings")("expandable_segments:True")
    return True


def _set_in_this_process() -> str:
    """What somebody has set so far, whom a second setting would overrule; torch 2.11 does not say, and this is ""."""
    try:
        return str(TORCH.get("torch._C", "_accelerator_getAllocatorSettings")())
    except MissingNameError:
        return ""
