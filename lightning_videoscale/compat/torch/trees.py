"""Nested structures of tensors, and tensors that wrap others. torch has no public module of either.

`tree_leaves(tree)`               the leaves of lists, tuples and dicts, nested in any way
`tree_flatten(tree)`               the leaves and the structure, which `tree_unflatten(leaves, structure)` fills again
`tree_map_only(kind, f, tree)`    the same structure with ``f`` applied to leaves of a type
`tree_flatten_with_path(tree)`    pairs of path and leaf, and the structure
`keystr(path)`                    a path as text
`tensors_of(output)`               all tensors of an output, also those in the attributes of an object
`is_wrapper(x)`                   whether a tensor holds other tensors, as a ``DTensor`` does
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.compat.torch import TORCH

tree_leaves = TORCH.function("torch.utils._pytree", "tree_leaves")
tree_flatten = TORCH.function("torch.utils._pytree", "tree_flatten")
tree_unflatten = TORCH.function("torch.utils._pytree", "tree_unflatten")
tree_map_only = TORCH.function("torch.utils._pytree", "tree_map_only")
tree_flatten_with_path = TORCH.function("torch.utils._pytree", "tree_flatten_with_path")
keystr = TORCH.function("torch.utils._pytree", "keystr")
is_wrapper = TORCH.function("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")


def tensors_of(output: Any) -> list[Tensor]:
    """Returns all tensors of an output, also those in the attributes of an object."""
    leaves = tree_leaves(output)
    leaves += [y for x in leaves if not isinstance(x, Tensor) and hasattr(x, "__dict__") for y in tree_leaves(vars(x))]
    return [x for x in leaves if isinstance(x, Tensor)]
