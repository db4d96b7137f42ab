"""The mesh of four ranks: its axes, and how it is divided late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_videoscale.parallel import (
    SequenceMesh,
    SplitPlan,
    parallelize,
)
from lightning_videoscale.parallel.layout import MACHINES, divide
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]


def places(ulysses_size: int, ring_size: int) -> tuple[Any, ...]:
    mesh = SequenceMesh.create("cpu", ulysses_size=ulysses_size, ring_size=ring_size)
    for axis in (mesh.dp, mesh.ring, mesh.ulysses, mesh.sp):
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        assert dist.get_rank(axis.group) == axis.rank
    assert mesh.device_mesh.mesh_dim_names == ("dp", "ring", "ulysses")
    return mesh.dp.ranks, mesh.ring.ranks, mesh.ulysses.ranks, mesh.sp.ranks, repr(mesh)


def test_ulysses_is_innermost_and_dp_outermost(ranks: Ranks) -> None:
    got = ranks(4).run(places, ulysses_size=2, ring_size=1)
    assert got[3] == ((1, 3), (3,), (2, 3), (2, 3), "SequenceMesh(dp=2, ring=1, ulysses=2)")
    got = ranks(4).run(places, ulysses_size=2, ring_size=2)
    assert got[3] == ((3,), (1, 3), (2, 3), (0, 1, 2, 3), "SequenceMesh(dp=1, ring=2, ulysses=2)")


# -- a mesh whose division is open ----------------------------------------------------------------------------------


def facts(mesh: SequenceMesh) -> list[tuple[Any, ...]]:
    """Ranks of each axis, and the sum of the ranks' numbers over it."""
    found = []
    for axis in (mesh.dp, mesh.ring, mesh.ulysses, mesh.sp):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=axis.group)
        found.append((axis.name, axis.ranks, axis.rank, total.item() == sum(axis.ranks)))
    return found


def divide_late() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with SequenceMesh.create("cpu", ulysses_size=2, ring_size=2) as named:
        found["named"] = facts(named)
    with SequenceMesh.create("cpu", sp_size=4) as mesh:
        found["open"] = mesh.device_mesh.mesh_dim_names, repr(mesh)
        with pytest.raises(RuntimeError, match="ulysses_size"):
            _ = mesh.ring
        with pytest.raises(ValueError, match="ulysses_size=3"):
            mesh.divide(3)
        mesh.divide(2)
        found["divided"] = facts(mesh)
        with pytest.raises(RuntimeError, match="divided already"):
            mesh.divide(2)
    with mesh:  # opened again
        found["again"], found["names"] = facts(mesh), mesh.device_mesh.mesh_dim_names
    return found


def test_a_mesh_may_be_divided_late(ranks: Ranks) -> None:
    for found in ranks(4).run(divide_late):
        assert found["open"] == (("dp", "sp"), "SequenceMesh(dp=1, sp=4)")
        assert found["named"] == found["divided"] == found["again"]
        assert all(agrees for *_, agrees in found["named"])
        assert found["names"] == ("dp", "ring", "ulysses")


def divide_as_rank_0_says() -> tuple[str, list[str], str]:
    """Rank 0 has GPUs on which three heads of long clips are better passed around; the others know nothing of that."""
    said: list[str] = []
    speeds = MACHINES["h200" if dist.get_rank() == 0 else "cpu"]
    with patch.object(divide, "machine_of", lambda name: speeds), SequenceMesh.create("cpu", sp_size=2) as mesh:
        parallelize(
            tiny_wan(num_attention_heads=3), mesh, tokens=2_000_000 if dist.get_rank() == 0 else 1, log=said.append
        )
        with SequenceMesh.create("cpu", sp_size=2) as other:
            parallelize(nn.Identity(), other, SplitPlan({}, {}, {}, lambda model, context: lambda: None))
            return repr(mesh), said, repr(other)


def test_all_ranks_divide_as_rank_0_says(ranks: Ranks) -> None:
    results = ranks(4).run(divide_as_rank_0_says)
    assert {mesh for mesh, _, _ in results} == {"SequenceMesh(dp=2, ring=2, ulysses=1)"}
    assert results[0][1][0].startswith("3 heads on 2 ranks: ulysses 1 x ring 2, predicted 1.")
    assert not any("heads" in line for _, said, _ in results[1:] for line in said)
    assert {own for *_, own in results} == {"SequenceMesh(dp=2, ring=1, ulysses=2)"}, "a function may know no ring"
