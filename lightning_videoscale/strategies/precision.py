"""Which precisions sharded parameters support, and in which dtype they travel.

Under ``bf16-mixed`` the ranks compute under autocast, as with DDP, and what differs is only what travels. Autocast
rounds the weights of the matrix products to bfloat16 before each product; gathered in bfloat16 they are rounded before
they travel instead of after, so the products see the same bits for half the traffic. Everything else in a transformer
block (norms, modulation tables, and whatever the model lists in ``_keep_in_fp32_modules``) and all that lies outside
the blocks travels in float32, as nothing would round it on one device either. Inputs are never cast: a timestep of 999
does not exist in bfloat16.
"""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_videoscale.compat.diffusers import kept_in_float32

_SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "64-true")


def check_precision(plugin: Precision, strategy: str) -> None:
    """Raises a ``ValueError`` unless the Trainer's precision is one that sharded parameters support.

    Lightning checks this only for strategies passed as objects, not for those selected by name.
    """
    precision = getattr(plugin, "precision", type(plugin).__name__)
    if precision not in _SUPPORTED:
        raise ValueError(
            f"{strategy} does not support precision={precision!r}: choose one of {', '.join(_SUPPORTED)}."
            + (" bf16-mixed needs no loss scaling." if precision == "16-mixed" else "")
        )


def rests_in_full(plugin: Precision) -> bool:
    """Whether the blocks' matrices travel in another dtype than they are stored in."""
    return plugin.precision == "bf16-mixed"


def full_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """Parameters travel as they are stored; gradients are summed in float32 at least, however they are stored."""
    reduce_dtype = torch.float32 if plugin.precision == "bf16-true" else None
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def rounded_policy() -> MixedPrecisionPolicy:
    """Parameters travel in bfloat16, gradients in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def rounded_by_autocast(network: nn.Module, block: str) -> set[nn.Parameter]:
    """Returns the parameters of a block that autocast rounds in any case: those of its matrix products.

    Args:
        network: The network; its ``_keep_in_fp32_modules``, where it has one, is heeded as diffusers does.
        block: Path of the block within the network.
    """
    kept = kept_in_float32(network)
    return {
        parameter
        for path, module in network.get_submodule(block).named_modules(prefix=block)
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.ndim > 1 or isinstance(module, nn.Linear)) and kept.isdisjoint(f"{path}.{name}".split("."))
    }
