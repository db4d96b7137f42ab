"""Nested structures of tensors, and tensors that wrap others. torch has no public module of either.

`tree_leaves(tree)`               the leaves of lists, tuples and dicts, nested in any way
`quick_leaves(tree)`              the same in a fraction of the time, for code that is not compiled
`COMMON_LEAVES`                    types of which everything is a leaf
`tree_flatten(tree)`               the leaves and the structure, which `tree_unflatten(leaves, structure)` fills again
`tree_map_only(kind, f, tree)`    the same structure with ``f`` applied to leaves of a type
`tree_flatten_with_path(tree)`    pairs of path and leaf, and the structure
`keystr(path)`                    a path as text
`tensors_of(output)`               all tensors of an output, also those in the attributes of an object
`is_wrapper(x)`                   whether a tensor holds other tensors, as a ``DTensor`` does
`plain_tensors(x)`                 those that it holds, however deep; of another tensor itself
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch import TORCH

tree_leaves = TORCH.function("torch.utils._pytree", "tree_leaves")
tree_flatten = TORCH.function("torch.utils._pytree", "tree_flatten")
tree_unflatten = TORCH.function("torch.utils._pytree", "tree_unflatten")
tree_map_only = TORCH.function("torch.utils._pytree", "tree_map_only")
tree_flatten_with_path = TORCH.function("torch.utils._pytree", "tree_flatten_with_path")
keystr = TORCH.function("torch.utils._pytree", "keystr")
is_wrapper = TORCH.function("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")

COMMON_LEAVES = frozenset((Tensor, torch.nn.Parameter, NoneType, bool, int, float, str, torch.dtype, torch.device))
"""Types of which everything is a leaf."""

_SEQUENCES = {tuple, list, torch.Size}


def quick_leaves(tree: Any) -> list[Any]:
    """Returns the leaves as `tree_leaves` does, which is asked only about uncommon containers."""
    leaves: list[Any] = []
    _add_leaves(tree, leaves, _containers())
    return leaves


@cache  # else the module's name would be looked up in each of a forward pass's thousands of calls
def _containers() -> Mapping[type, Any]:
    containers: Mapping[type, Any] = TORCH.get("torch.utils._pytree", "SUPPORTED_NODES")
    return containers


def _add_leaves(tree: Any, leaves: list[Any], containers: Mapping[type, Any]) -> None:
    kind = type(tree)
    if kind in _SEQUENCES and kind in containers:
        children = tree
    elif kind is dict or kind is OrderedDict:
        children = tree.values()
    else:  # named tuples are containers though nobody registers them
        is_container = kind not in COMMON_LEAVES and (kind in containers or issubclass(kind, tuple))
        leaves += tree_leaves(tree) if is_container else [tree]
        return
    for child in children:
        if type(child) in COMMON_LEAVES:
            leaves.append(child)
        else:
            _add_leaves(child, leaves, containers)


def tensors_of(output: Any) -> list[Tensor]:
    """Returns all tensors of an output, also those in the attributes of an object."""
    leaves = tree_leaves(output)
    leaves += [y for x in leaves if not isinstance(x, Tensor) and hasattr(x, "__dict__") for y in tree_leaves(vars(x))]
    return [x for x in leaves if isinstance(x, Tensor)]


def plain_tensors(x: Any) -> Iterator[Tensor]:
    """Yields the tensors that a tensor consists of, which hold no others: themselves, no copies."""
    if not is_wrapper(x):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(x, name))
