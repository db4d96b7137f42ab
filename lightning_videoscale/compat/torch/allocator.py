"""How CUDA's memory is allocated."""

from __future__ import annotations

import os

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.torch import TORCH

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROW = "expandable_segments:True"
_REGISTER = "NCCL_GRAPH_REGISTER"


def expand_segments() -> bool:
    """Lets segments of memory grow from now on, and says whether it did: who has set anything is left alone.

    With segments of fixed sizes, micro-batches of ever other sizes leave gaps that none of the next fits into. Only the
    environment is public, and it is read when the first tensor is made.

    Where segments grow, by whomever, NCCL is told not to register the buffers of collectives in CUDA graphs. It takes
    each for one allocation, which in such segments it is not, and a graph may then wait forever
    (pytorch/pytorch#158029). Who wants them registered keeps segments of fixed sizes.
    """
    is_ours = not any(_settings()) and not _registers()
    if is_ours:
        TORCH.get("torch._C", "_accelerator_setAllocatorSettings")(_GROW)
    if (is_ours or _grow()) and not _registers():
        os.environ[_REGISTER] = "0"
    return is_ours


def refuse_registered_graphs() -> None:
    """To be called where CUDA graphs will hold collectives.

    Raises:
        ValueError: If segments grow, and NCCL registers the buffers of such collectives; see `expand_segments`.
    """
    if _grow() and _registers():
        raise ValueError(
            f"{_REGISTER}={os.environ[_REGISTER]} and {_GROW} exclude each other where CUDA graphs exchange: "
            "NCCL takes each buffer for one allocation, and the run may hang (pytorch/pytorch#158029). Leave one of "
            "them out, or pass graphs=False."
        )


def _settings() -> list[str]:
    return [*(os.environ.get(name, "") for name in _SETTINGS), _set_in_this_process()]


def _grow() -> bool:
    return any(_GROW in setting.replace(" ", "") for setting in _settings())


def _registers() -> bool:
    return os.environ.get(_REGISTER, "") not in ("", "0")


def _set_in_this_process() -> str:
    """What somebody has set so far, whom a second setting would overrule; torch 2.11 does not say, and this is ""."""
    try:
        return str(TORCH.get("torch._C", "_accelerator_getAllocatorSettings")())
    except MissingNameError:
        return ""
