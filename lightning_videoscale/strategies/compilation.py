"""Compilation of a network's transformer blocks, one by one: `compile_blocks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_videoscale.compat.torch.compilation import with_integers_that_vary
from lightning_videoscale.compat.torch.versions import mix_order_reduction_is_wrong
from lightning_videoscale.strategies.blocks import find_blocks, replace_forwards
from lightning_videoscale.undo import Undo

CompileOptions = bool | Mapping[str, Any]
"""False, True, or keyword arguments of ``torch.compile``."""


def compile_blocks(network: nn.Module, options: CompileOptions, *, stays_compiled: bool = False) -> Undo:
    """Compiles the forward of every transformer block, in place and inside its hooks.

    Blocks of one class share their compiled code. Of split sequences, it is compiled once for the first length and once
    for all others. Few things add to that: a stream of one token on a rank, inputs whose layout differs between
    blocks, masked keys of which some ranks have one or two less. ``{"dynamic": False}`` compiles each length for
    itself, eight at most.

    Exchanges between ranks are part of it. Hooks, such as those that split a sequence or gather sharded parameters, run
    around the compiled forward, and activation checkpointing applied later runs it again as a whole.

    Args:
        network: What holds the blocks, see `find_blocks`.
        options: True, or keyword arguments of ``torch.compile``.
        stays_compiled: Makes it an error where torch would run a block without compilation, as it was compiled too
            often. So it must be where the two exchange other messages, as by other schedules than "serial".

    Returns:
        What takes it back.
    """
    blocks = list(find_blocks(network).values())
    arguments = dict(options) if isinstance(options, Mapping) else {}
    by_inductor = arguments.get("backend", "inductor") == "inductor"  # no other backend knows its options
    chosen = {"mode", "options"} & arguments.keys()
    if by_inductor and not chosen and torch.cuda.is_available() and mix_order_reduction_is_wrong():
        arguments["options"] = {"triton.mix_order_reduction": False}

    def compiled(_: nn.Module, forward: Any) -> Any:
        return with_integers_that_vary(torch.compile(forward, **arguments), stays_compiled=stays_compiled)

    return replace_forwards(blocks, compiled)
