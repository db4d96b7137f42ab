"""What one call of a network is to a CUDA graph: its tensors, and everything else, which a graph holds constant."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import active_attention_backend
from lightning_videoscale.compat.torch.attention import sdpa_choice
from lightning_videoscale.compat.torch.autograd import (
    dispatch_modes_active,
    function_modes,
    function_transforms_active,
    in_forward_mode,
    saved_tensors_pack_hook,
)
from lightning_videoscale.compat.torch.modules import has_global_hooks
from lightning_videoscale.compat.torch.precision import product_settings
from lightning_videoscale.compat.torch.trees import tree_flatten

DEVICE = "cuda"
"""Type of the devices that have graphs."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.layout)
"""What cannot change, so that equal arguments are alike."""


class NetworkCall(NamedTuple):
    """The inputs of one call.

    Attributes:
        key: Equal for calls that one graph can serve.
        leaves: Of the arguments, in the order of their structure.
        structure: As `tree_unflatten` takes it.
        tensors: Those of the leaves that are tensors.
    """

    key: Hashable
    leaves: list[Any]
    structure: Any
    tensors: list[Tensor]


def read_call(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NetworkCall | str:
    """Returns what a call consists of, or why no graph can serve it."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
            return f"an input is a {type(tensor).__name__}"
    others = [leaf for leaf in leaves if not is_plain(leaf)]
    if others:
        kinds = sorted({type(leaf).__name__ for leaf in others})
        return f"an input of type {kinds} may change, and still be the same object"
    elsewhere = next((tensor.device for tensor in tensors if tensor.device.type != DEVICE), None)
    if elsewhere is not None:
        return f"an input is on {elsewhere}"
    facts = tuple(_fact(leaf) for leaf in leaves)
    return NetworkCall((facts, repr(structure), network.training, *_modes()), leaves, structure, tensors)


def is_plain(leaf: Any) -> bool:
    """Whether an argument, or a part of what is returned, is a tensor or cannot change."""
    return isinstance(leaf, (Tensor, *_PLAIN))


def is_observed() -> bool:
    """Whether something follows each operation or module: a transform, a counter, a hook on what is saved."""
    return (
        function_transforms_active()
        or in_forward_mode()
        or dispatch_modes_active() > 0
        or bool(function_modes())
        or saved_tensors_pack_hook() is not None
        or has_global_hooks()
    )


def _fact(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad and torch.is_grad_enabled()
    return type(leaf), leaf


def _modes() -> tuple[Hashable, ...]:
    """Switches of torch that decide which kernels run."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *product_settings(),
        sdpa_choice(),
        active_attention_backend(),
    )
