"""The mesh of ranks: dp × ring × ulysses, with `sp` = ring × ulysses.

We say *axis* for an axis of the mesh and *dim* for a dimension of a tensor. Ulysses is the innermost axis: its
all-to-all moves the most bytes per layer and belongs on the fastest links, inside a node.

`SequenceMesh.create`  builds the process groups (collective: every rank calls it with the same sizes)
`Axis`                 one axis as seen from this rank: its group, its ranks, this rank's place
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as seen from this rank.

    Attributes:
        name: ``"dp"``, ``"ring"``, ``"ulysses"`` or ``"sp"``.
        group: Process group of the ranks along this axis that differ from this rank in nothing else.
        ranks: Their global ranks, in order along the axis.
        rank: This rank's position on the axis, an index into ``ranks``.
    """

    name: str
    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class SequenceMesh:
    """All ranks of a job, arranged as dp × ring × ulysses (row-major: neighbouring ranks share a Ulysses group).

    Attributes:
        dp: Ranks that hold the same slice of different batches.
        ring: Ranks that pass keys and values around.
        ulysses: Ranks that trade sequence slices for heads.
        sp: Ranks that work on one batch together (ring × ulysses).
        device_mesh: The same axes as a ``DeviceMesh`` with names ``("dp", "ring", "ulysses")``.
    """

    dp: Axis
    ring: Axis
    ulysses: Axis
    sp: Axis
    device_mesh: DeviceMesh

    @classmethod
    def create(
        cls, device_type: str, *, ulysses_size: int, ring_size: int = 1, timeout: timedelta | None = None
    ) -> SequenceMesh:
        """Arranges all ranks of the default process group; collective over them.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
            ulysses_size: Ranks per Ulysses group.
            ring_size: Ranks per ring.
            timeout: How long a collective of these groups may wait for its peers; the backend's default if left out.

        Raises:
            ValueError: If the number of ranks is not a multiple of ``ring_size * ulysses_size``.
        """
        world = dist.get_world_size()
        check_sizes(world, ulysses_size=ulysses_size, ring_size=ring_size)
        ranks = torch.arange(world).view(-1, ring_size, ulysses_size)
        dp = _axis("dp", ranks.permute(1, 2, 0), timeout)
        ring = _axis("ring", ranks.permute(0, 2, 1), timeout)
        ulysses = _axis("ulysses", ranks, timeout)
        # One group serves both names where they cover the same ranks: fewer communicators, less memory.
        if ring_size == 1:
            sp = Axis("sp", ulysses.group, ulysses.ranks, ulysses.rank)
        else:
            sp = _axis("sp", ranks.flatten(1), timeout)
        device_mesh = DeviceMesh.from_group(
            [dp.group, ring.group, ulysses.group], device_type, mesh=ranks, mesh_dim_names=("dp", "ring", "ulysses")
        )
        return cls(dp, ring, ulysses, sp, device_mesh)

    def __repr__(self) -> str:
        return f"SequenceMesh(dp={self.dp.size}, ring={self.ring.size}, ulysses={self.ulysses.size})"


def check_sizes(world_size: int, *, ulysses_size: int, ring_size: int = 1) -> None:
    """Raises a ``ValueError`` that names the sizes that would work unless the ranks fall into whole groups."""
    sp_size = ulysses_size * ring_size
    if min(ulysses_size, ring_size) < 1:
        raise ValueError(f"ulysses_size={ulysses_size} and ring_size={ring_size} must both be at least 1.")
    if world_size % sp_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"{world_size} devices cannot be split into sequence-parallel groups of {sp_size} "
            f"(ulysses_size={ulysses_size} x ring_size={ring_size}). Choose sizes whose product is one of {divisors}, "
            f"or a number of devices that is a multiple of {sp_size}."
        )


def _axis(name: str, ranks: torch.Tensor, timeout: timedelta | None) -> Axis:
    """Creates the groups along the last dim of ``ranks`` and returns the one that holds this rank."""
    rows: list[list[int]] = ranks.reshape(-1, ranks.shape[-1]).tolist()
    # Every rank creates every group, in the same order, as torch.distributed requires.
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)
    assert group is not None  # the rows partition the world
    me = dist.get_rank()
    mine = next(row for row in rows if me in row)
    return Axis(name, group, tuple(mine), mine.index(me))
