"""The transformer blocks of a network: the unit of sharding, of activation checkpointing and of compilation."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.compat.diffusers import block_classes, wrap_own_checkpoints
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.families import known
from lightning_videoscale.parallel.plan import matching_modules
from lightning_videoscale.undo import Undo

_OfBlock = Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]  # of a block, and of its forward


def find_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the transformer blocks of a network by path, in the order of its modules.

    A family may name them (`families.BLOCKS`). Other models of diffusers name the classes of their blocks
    (``_repeated_blocks``, ``_no_split_modules``). Elsewhere the blocks are the children of every ``ModuleList`` whose
    children all share one class that holds parameters.

    Raises:
        ValueError: If nothing in the network looks like a list of blocks.
    """
    adapter: Any = network
    if hasattr(network, "get_base_model"):  # peft's PeftModel
        adapted = adapter.get_base_model()
        prefix = next(path for path, module in network.named_modules() if module is adapted)
        return {f"{prefix}.{path}": block for path, block in find_blocks(adapted).items()}
    names, patterns = block_classes(network), known("BLOCKS", type(network))
    if patterns is not None:
        return {path: block for pattern in patterns for path, block in matching_modules(network, pattern).items()}
    if names:
        found = {
            path: module
            for path, module in network.named_modules()
            if not names.isdisjoint(base.__name__ for base in type(module).__mro__)
        }
    else:
        found = {
            f"{path}.{name}" if path else name: child
            for path, module in network.named_modules()
            if isinstance(module, nn.ModuleList) and _is_list_of_blocks(module)
            for name, child in module.named_children()
        }
    if not found:
        children = dict(Counter(type(child).__name__ for child in network.children()))
        raise ValueError(
            f"No transformer blocks found in {type(network).__name__} (children: {children}): it needs a ModuleList "
            "whose members share one class."
        )
    outermost: dict[str, nn.Module] = {}
    for path, block in found.items():
        if not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost[path] = block
    return outermost


def checkpoint_activations(network: nn.Module, share: float = 1.0) -> Undo:
    """Makes blocks keep only their inputs for backward and compute the rest again there.

    The blocks' forward is wrapped in place, inside their hooks: class, parameters and ``state_dict`` stay, and what a
    hook splits is kept split.

    Args:
        network: With blocks.
        share: Of the blocks, rounded up: the first ones. What the last ones keep is gone by the time backward computes
            a block again, so that its activations need no memory beside theirs.

    Returns:
        What takes it back.

    Raises:
        ValueError: If the network checkpoints its activations already, or has no blocks.
    """
    if getattr(network, "gradient_checkpointing", False):
        raise ValueError(
            f"{type(network).__name__} has its own gradient checkpointing on: leave out activation_checkpointing=True, "
            "or do not call enable_gradient_checkpointing()."
        )
    blocks = list(find_blocks(network).values())
    return replace_forwards(blocks[: math.ceil(round(share * len(blocks), 6))], _checkpointed)


def watch_own_checkpoints(network: nn.Module) -> Undo:
    """Makes it an error if blocks that diffusers checkpoints are computed again by other adapters than before.

    Args:
        network: One of diffusers. Without ``enable_gradient_checkpointing()`` nothing is changed.

    Returns:
        What takes it back.
    """
    return Undo(*wrap_own_checkpoints(network, _with_the_same_adapters))


def replace_forwards(blocks: Sequence[nn.Module], change: _OfBlock) -> Undo:
    """Gives every block the changed forward, inside its hooks; returns what takes it back."""
    return Undo(*(patch(block, "forward", _ChangedForward(block, block.forward, change)) for block in blocks))


class _ChangedForward:
    """A changed forward of which a copy of its block gets its own: a function would go on to run the first block."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], change: _OfBlock) -> None:
        self._block, self._forward, self._change, self._changed = block, forward, change, change(block, forward)
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._changed(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ChangedForward:
        return _ChangedForward(copy.deepcopy(self._block, memo), copy.deepcopy(self._forward, memo), self._change)


def _checkpointed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def adapted() -> dict[str, Any]:  # at its first call: a copy of a block has no modules yet while it is made
        return _adapted_layers(block)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(_refusing_others(adapted(), forward), *args, use_reentrant=False, **kwargs)

    return recomputed


def _with_the_same_adapters(checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """Of what calls a block and computes it again, the same that is given a block which looks at its adapters."""
    known_blocks: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()  # a copied network shares this

    def watched(block: Any, *args: Any) -> Any:
        if not isinstance(block, nn.Module):
            return checkpointed(block, *args)
        if block not in known_blocks:
            known_blocks[block] = _adapted_layers(block)
        layers = known_blocks[block]
        return checkpointed(_refusing_others(layers, block) if layers else block, *args)

    return watched


def _adapted_layers(block: nn.Module) -> dict[str, Any]:
    return {path: layer for path, layer in block.named_modules() if hasattr(layer, "active_adapters")}


def _refusing_others(layers: Mapping[str, Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what raises, instead of calling ``run``, once other adapters are active than now."""
    if not layers:
        return run
    then = _chosen_adapters(layers)

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_adapters(then, _chosen_adapters(layers))
        return run(*args, **kwargs)

    return checked


def _chosen_adapters(layers: Mapping[str, Any]) -> dict[str, str]:
    """What peft's layers would compute now, by path; a network is told otherwise between its calls."""
    return {
        path: "none" if layer.disable_adapters else f"{layer.active_adapters} scaled by {getattr(layer, 'scaling', {})}"
        for path, layer in layers.items()
    }


def _check_adapters(then: dict[str, str], now: dict[str, str]) -> None:
    path = next((path for path in then if then[path] != now[path]), None)
    if path is not None:
        raise RuntimeError(
            "Adapters were changed between forward and backward, in which checkpointed blocks are computed again: at "
            f"{path} of a block they were {then[path]}, and are {now[path]}. Make them active again before backward. A "
            "scale in attention_kwargs ends with the call: give it to set_adapters(names, weights=...) instead. Or "
            "leave out activation_checkpointing=True, or enable_gradient_checkpointing()."
        )


def _is_list_of_blocks(module: nn.ModuleList) -> bool:
    classes = {type(child) for child in module}
    return len(module) > 1 and len(classes) == 1 and any(True for _ in next(iter(module)).parameters())
