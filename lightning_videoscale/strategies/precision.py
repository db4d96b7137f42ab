"""Which precisions sharded parameters support, and in which dtype they are all-gathered.

Under ``bf16-mixed`` the ranks compute under autocast, as with DDP; only the dtype of the all-gather differs. Autocast
rounds the weights of torch's linear layers and convolutions to bfloat16 before each product. Rounded before the
all-gather instead of after it, they give the products the same bits for half the traffic. Everything else in a
transformer block (norms, embeddings, modulation tables and other bare parameters, modules with a forward of their own,
and whatever the model lists in ``_keep_in_fp32_modules``) and all that lies outside the blocks is gathered in float32,
as nothing would round it on one device either. Inputs are never cast: a timestep of 999 does not exist in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_videoscale.compat.diffusers import kept_in_float32

FSDP2_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
ZERO_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
# Modules whose forward uses their own parameters in nothing but what autocast computes in bfloat16. The parts of a
# network that peft adapts, and that fused kernels compute, still are such modules.
_PRODUCTS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)


def check_precision(precision: str, strategy: str, supported: Sequence[str]) -> None:
    """Raises a ``ValueError`` unless the Trainer's precision is one of those that a strategy supports."""
    if precision in supported:
        return
    raise ValueError(
        f"{strategy} does not support precision={precision!r}: choose one of {', '.join(supported)}."
        + (" bf16-mixed needs no loss scaling." if precision == "16-mixed" else "")
        + (" ulysses_ddp and ulysses_fsdp2 train in float64." if precision == "64-true" else "")
    )


def gathers_in_bfloat16(plugin: Precision) -> bool:
    """Whether the blocks' matrices, stored in float32, are all-gathered in bfloat16."""
    return plugin.precision == "bf16-mixed"


def stored_dtype_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """Parameters are gathered in the dtype they are stored in; gradients are reduced in float32 at least."""
    reduce_dtype = torch.float32 if plugin.precision == "bf16-true" else None
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def block_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """That of the blocks: parameters are gathered in bfloat16 where `gathers_in_bfloat16`, and reduced in float32."""
    if not gathers_in_bfloat16(plugin):
        return stored_dtype_policy(plugin)
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
        if _is_product(module)
        for name, parameter in module.named_parameters(recurse=False)
        if kept.isdisjoint(f"{path}.{name}".split("."))
    }


def refuse_outside_of_autocast(block: nn.Module, path: str, device: torch.device) -> None:
    """Has a block whose weights are gathered in bfloat16 refuse calls in which autocast would not round them so."""

    def refuse(*_: Any) -> None:
        kind = device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if dtype is not torch.bfloat16:
            raise RuntimeError(
                f"{path} is called {f'under autocast to {dtype}' if dtype else 'outside of autocast'}. By bf16-mixed, "
                "FSDP2 gathers its weights in bfloat16, which autocast would do to them: call it within "
                f"torch.autocast({kind!r}, torch.bfloat16). To compute in other dtypes, take precision='32-true' and "
                "autocast of your own, or ulysses_ddp."
            )

    block.register_forward_pre_hook(refuse, prepend=True)


def _is_product(module: nn.Module) -> bool:
    """Whether a module is one of `_PRODUCTS`; a subclass with a forward of its own may use its weights in any way."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _PRODUCTS)
