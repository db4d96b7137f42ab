"""Nested structures are taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from lightning_videoscale.compat.torch import trees


def test_a_structure_is_filled_again() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (3, None), "c": {}}
    leaves, structure = trees.tree_flatten(tree)
    assert leaves == [tree["a"][0], 2, 3, None]
    assert trees.tree_unflatten(leaves, structure) == tree
    assert trees.tree_unflatten([1, 2, 3, 4], structure) == {"a": [1, 2], "b": (3, 4), "c": {}}
    assert structure == trees.tree_flatten({"a": [0, 0], "b": (0, 0), "c": {}})[1] != trees.tree_flatten({"a": [0]})[1]


@pytest.mark.parametrize(
    "tree",
    [
        (torch.ones(1), {"a": [2, None, ("b",)], "c": torch.float32}, torch.nn.Parameter(torch.ones(1)), True, [], {}),
        [
            namedtuple("Pair", "a b")(torch.ones(1), (1, 2)),
            OrderedDict(a=1, b=[2]),
            torch.ones(2, 3).shape,
            {3},
            object,
        ],
        torch.return_types.max((torch.ones(1), torch.zeros(1))),
        torch.ones(1),
        None,
    ],
)
def test_leaves_that_are_found_quickly_are_the_same(tree: Any) -> None:
    expected, found = trees.tree_leaves(tree), trees.quick_leaves(tree)
    assert len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def test_a_tensor_that_is_spread_over_ranks_wraps_another() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert trees.is_wrapper(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,))))
    assert not trees.is_wrapper(torch.nn.Parameter(torch.ones(2)))


def test_plain_tensors_are_those_inside() -> None:
    a, b, c = (torch.ones(1) for _ in range(3))
    assert [id(x) for x in trees.plain_tensors(TwoTensor(TwoTensor(a, b), c))] == [id(a), id(b), id(c)]
    assert [*trees.plain_tensors(a)] == [a]
