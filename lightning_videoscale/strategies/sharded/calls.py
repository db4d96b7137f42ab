"""Calls of a sharded module of which FSDP2 would lose something: `watch_calls`.

FSDP2 puts parameters in their places when a module is called, and again when backward reaches what the module has
returned. It does not see whether other tensors were in these places, nor whether a loss is of hidden states alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.compat.torch.data_parallel import replacements
from lightning_videoscale.compat.torch.trees import tensors_of
from lightning_videoscale.strategies.lightning_messages import first_names
from lightning_videoscale.strategies.units import class_before_sharding


def watch_calls(network: nn.Module) -> None:
    """Has a sharded network refuse parameters of others, and gather its own where backward begins inside of it.

    Backward may begin at the outputs of its blocks and of its other children, as where a hook keeps them.
    """
    _refuse_replaced(network)
    if not isinstance(network, FSDPModule):
        return

    def gather(_: Tensor) -> None:
        network.unshard()  # nothing is done where backward came from what the network has returned

    def watch_outputs(_module: nn.Module, _args: Any, output: Any) -> None:
        for x in tensors_of(output):
            if x.requires_grad:
                x.register_hook(gather)

    blocks = [module for module in network.modules() if isinstance(module, FSDPModule) and module is not network]
    for module in dict.fromkeys([*blocks, *network.children()]):
        module.register_forward_hook(watch_outputs)


def _refuse_replaced(network: nn.Module) -> None:
    replaced = replacements(network)

    def refuse(*_: Any) -> None:
        names = replaced()
        if names:
            raise NotImplementedError(
                f"{class_before_sharding(network).__name__} is called with other tensors in the place of "
                f"{first_names(names)}, as by torch.func.functional_call. FSDP2 would compute with its own. Use "
                'strategy="ulysses_ddp", or give these weights a network of their own: a copy made in __init__ or '
                "configure_model, named in shard_frozen= if it is frozen."
            )

    network.register_forward_pre_hook(refuse, prepend=True)  # before FSDP2 puts its own there
