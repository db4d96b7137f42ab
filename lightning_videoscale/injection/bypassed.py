"""Modules whose work a fused forward does itself, without calling them: whether that is still all they do.

People register hooks, add adapters and put other modules in their place at any time, also after the injection. So fused
forwards look at every call, and leave it to the original where something has changed.
"""

from __future__ import annotations

from torch import nn

from lightning_videoscale.compat.patching import replaces_forward
from lightning_videoscale.compat.torch.modules import hooks_of
from lightning_videoscale.injection.methods import replacement_among

_METHODS = "forward", "__call__"


def has_hooks(module: nn.Module) -> bool:
    """Whether calling it, or its backward, does more than its class says.

    Hooks of ZeRO do not count: it gathers parameters wherever they are read.
    """
    if replaces_forward(module):
        return True
    kinds = hooks_of(module)
    if kinds is None:  # nearly always: fused forwards ask of every module in every call
        return False
    return not all(str(hook.__module__).startswith("deepspeed.") for kind in kinds for hook in kind.values())


def has_readers(module: nn.Module) -> bool:
    """Whether hooks, or a forward put around its own, see what it returns; those of engines hand it on as it is."""
    engines = ("deepspeed.", "torch.distributed.", "lightning_videoscale.")
    kinds = hooks_of(module)
    after = kinds[1].values() if kinds is not None else ()
    return "forward" in vars(module) or not all(str(hook.__module__).startswith(engines) for hook in after)


def changed(module: nn.Module, *helpers: str) -> str | None:
    """Returns what calling it, its backward or these methods do beyond what its class was written for, or None."""
    own, methods = module.__dict__, _METHODS + helpers
    for method in methods:
        if method in own:
            return f"has a {method} that was replaced on the instance"
    if (replacement := replacement_among(type(module), methods)) is not None:
        return f"has a {replacement}"
    return "has hooks, which would not be called" if has_hooks(module) else None
