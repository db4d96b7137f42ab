"""The mesh of ranks: dp × ring × ulysses, with `sp` = ring × ulysses. It makes and closes all process groups there are.

We say *axis* for an axis of the mesh and *dim* for a dimension of a tensor. Ulysses is the innermost axis: its
all-to-all moves the most bytes per layer and belongs on the fastest links, inside a node.

`SequenceMesh.create`  builds the process groups (collective: every rank calls it with the same sizes)
`Axis`                 one axis as seen from this rank: its group, its ranks, this rank's place
`host_group`           a gloo group of all ranks for a while, which needs no mesh
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from lightning_videoscale.parallel.layout.sizes import Size, resolve_sizes
from lightning_videoscale.parallel.region_randomness import RegionsEntered

_BACKGROUND = "lightning_videoscale: in the background"


class Axis:
    """One axis of the mesh as seen from this rank.

    Args:
        name: ``"dp"``, ``"ring"``, ``"ulysses"`` or ``"sp"``.
        group: Process group of the ranks along this axis that differ from this rank in nothing else.
        ranks: Their global ranks, in order along the axis.
        rank: This rank's position on the axis, an index into ``ranks``.

    Attributes:
        name: As given.
        ranks: As given.
        rank: As given.
        size: Number of ranks along the axis.
    """

    def __init__(self, name: str, group: ProcessGroup | None, ranks: tuple[int, ...], rank: int) -> None:
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self._group = group

    @property
    def group(self) -> ProcessGroup:
        """Process group of the ranks.

        Raises:
            RuntimeError: If the mesh is closed.
        """
        if self._group is None:
            raise RuntimeError(
                f"The process group of the ranks {self.ranks} along {self.name} is closed, as all are when a Trainer's "
                "run ends or SequenceMesh.close is called. Call a split model inside the Trainer's run, or, on all "
                "ranks, inside `with strategy.mesh:`; in plain PyTorch between SequenceMesh.create and close."
            )
        return self._group


class SequenceMesh:
    """All ranks of a job, arranged as dp × ring × ulysses (row-major: neighbouring ranks share a Ulysses group).

    Owns its process groups: `open` makes them and `close` destroys them, any number of times. Whatever holds the mesh
    or its axes, such as a split model, works again after the next `open`. As a context manager it closes on leaving.

    How the ranks of a group divide into ulysses × ring may be left open, by naming ``sp_size`` alone. Until `divide`
    says it, as `parallelize` and our strategies do once they know the model's heads, there are dp and sp only.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        ulysses_size: Ranks per Ulysses group; ``"auto"`` or left out: what the others leave.
        ring_size: Ranks per ring; 1 if only ``ulysses_size`` is named, else as for it.
        sp_size: Ranks that work on one batch together; left out: the product of the two.
        timeout: How long a collective of these groups may wait for its peers; the backend's default if left out.

    Attributes:
        dp: Ranks that hold the same slice of different batches.
        sp: Ranks that work on one batch together (ring × ulysses).
        device_type: As given.
        regions: Counts where split networks draw random numbers, so that two of them draw others.
        device_mesh: The same axes as a ``DeviceMesh`` with names ``("dp", "ring", "ulysses")``, from the first `open`
            on; ``("dp", "sp")`` while the division is open.

    Raises:
        ValueError: If the number of ranks is not a multiple of ``ring_size * ulysses_size``, the sizes contradict each
            other, or none is named.
    """

    device_mesh: DeviceMesh

    def __init__(
        self,
        device_type: str,
        *,
        ulysses_size: Size = None,
        ring_size: Size = None,
        sp_size: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        world = dist.get_world_size()
        size, ulysses = resolve_sizes(ulysses_size, ring_size, sp_size)
        check_sizes(world, size, ulysses)
        self.device_type, self._timeout = device_type, timeout
        self._ranks = torch.arange(world).view(-1, size)
        self._rows = {"dp": _rows(self._ranks.T), "sp": _rows(self._ranks)}
        self._axes = {name: _axis(name, rows) for name, rows in self._rows.items()}
        self.dp, self.sp = self._axes.values()
        if ulysses is not None:
            self._add_axes(ulysses)
        self._shared: dict[str, ProcessGroup] = {}
        self._duplicates: list[tuple[Axis, str | None]] = []
        self._sharding: dict[int, DeviceMesh] = {}
        self._groups: list[ProcessGroup] = []
        self._sharding_groups: list[ProcessGroup] = []
        self._reopened = False
        self.regions = RegionsEntered()

    @classmethod
    def create(
        cls,
        device_type: str,
        *,
        ulysses_size: Size = None,
        ring_size: Size = None,
        sp_size: int | None = None,
        timeout: timedelta | None = None,
    ) -> Self:
        """Returns an open mesh of all ranks of the default process group; collective over them. See the class."""
        mesh = cls(device_type, ulysses_size=ulysses_size, ring_size=ring_size, sp_size=sp_size, timeout=timeout)
        mesh.open()
        return mesh

    @property
    def ring(self) -> Axis:
        """Ranks that pass keys and values around.

        Raises:
            RuntimeError: If the division is still open.
        """
        return self._divided("ring")

    @property
    def ulysses(self) -> Axis:
        """Ranks that trade sequence slices for heads.

        Raises:
            RuntimeError: If the division is still open.
        """
        return self._divided("ulysses")

    @property
    def is_divided(self) -> bool:
        """Whether it is said how `sp` divides into ulysses × ring."""
        return "ulysses" in self._axes

    def divide(self, ulysses_size: int) -> None:
        """Says how `sp` divides, once and for all; collective over all ranks where the mesh is open.

        Args:
            ulysses_size: Ranks per Ulysses group; the rings get what is left.

        Raises:
            ValueError: If that does not divide the ranks of `sp`.
            RuntimeError: If the mesh is divided already.
        """
        if self.is_divided:
            raise RuntimeError(f"{self} is divided already, and what it splits relies on that: make another mesh.")
        if ulysses_size < 1 or self.sp.size % ulysses_size:
            raise ValueError(f"ulysses_size={ulysses_size} does not divide the {self.sp.size} ranks of a group.")
        self._add_axes(ulysses_size)
        if self._groups:
            self._open_axes()

    def open(self) -> None:
        """Makes the process groups unless they are there; collective over all ranks."""
        if self._groups:
            return
        self._open_axes()
        for axis, backend in self._duplicates:
            axis._group = self._create(self._rows[axis.name], backend)
        if dist.get_backend() == "gloo":
            dist.barrier()  # over gloo, a rank that leaves at once would break connections that its peers still make

    def _add_axes(self, ulysses_size: int) -> None:
        self._ranks = self._ranks.view(len(self._ranks), -1, ulysses_size)
        self._rows |= {"ring": _rows(self._ranks.permute(0, 2, 1)), "ulysses": _rows(self._ranks)}
        self._axes |= {name: _axis(name, self._rows[name]) for name in ("ring", "ulysses")}

    def _open_axes(self) -> None:
        """Makes the groups of the axes that have none yet."""
        for axis in self._axes.values():
            # One group serves all axes that cover the same ranks: fewer communicators, less memory.
            rows = str(self._rows[axis.name])
            if rows not in self._shared:
                self._shared[rows] = self._create(self._rows[axis.name])
            axis._group = self._shared[rows]
        names = ("dp", "ring", "ulysses") if self.is_divided else ("dp", "sp")
        groups = [self._axes[name].group for name in names]
        self.device_mesh = DeviceMesh.from_group(groups, self.device_type, mesh=self._ranks, mesh_dim_names=names)

    def _divided(self, name: str) -> Axis:
        axis = self._axes.get(name)
        if axis is None:
            raise RuntimeError(
                f"{self} is not divided into ulysses x ring yet. A strategy does it in its setup, when the model "
                "exists, and parallelize when it splits one. To have it earlier, set ulysses_size."
            )
        return axis

    def duplicate(self, axis: Axis, backend: str | None = None) -> Axis:
        """Returns an axis of the same ranks with a group of its own; collective over all ranks of the job.

        Its collectives do not wait for those of the axis that it was made from, as of two MPI communicators.

        Args:
            axis: One of the mesh's.
            backend: ``"gloo"`` for tensors of the host; the mesh's own if left out.
        """
        own = _axis(axis.name, self._rows[axis.name])
        own._group = self._create(self._rows[axis.name], backend)
        self._duplicates.append((own, backend))
        return own

    def sharding(self, replicas: int = 1) -> DeviceMesh:
        """All ranks in one row for ``fully_shard``: ``("shard",)``, or ``("replicate", "shard")`` for several copies.

        Collective over all ranks.

        Args:
            replicas: Copies of the model, each sharded over neighbouring ranks.

        Raises:
            ValueError: If that does not divide the number of ranks.
        """
        world = self._ranks.numel()
        if replicas < 1 or world % replicas:
            raise ValueError(f"replicas={replicas} does not divide the {world} devices: choose a divisor of it.")
        if replicas == 1:
            assert dist.group.WORLD is not None
            return DeviceMesh.from_group(dist.group.WORLD, self.device_type, mesh_dim_names=("shard",))
        if replicas not in self._sharding:
            ranks = torch.arange(world).view(replicas, -1)
            groups = [_create(_rows(rows), self._timeout) for rows in (ranks.T, ranks)]
            self._sharding_groups += groups
            self._sharding[replicas] = DeviceMesh.from_group(
                groups, self.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
            )
        return self._sharding[replicas]

    def close(self, *, keep_sharding: bool = False, after_failure: bool = False) -> None:
        """Destroys the process groups; collective over all ranks, but for `after_failure`. Closed: does nothing.

        Args:
            keep_sharding: Leave those of `sharding` alone, over which parameters may still be sharded.
            after_failure: A peer may be gone, so wait for nobody and destroy gloo's groups alone. NCCL's would wait for
                the peer: they are given up, and end with the process.
        """
        groups, self._groups = self._groups, []
        if not keep_sharding:
            groups += self._sharding_groups
            self._sharding_groups, self._sharding = [], {}
        self._shared = {}
        for axis in (*self._axes.values(), *(axis for axis, _ in self._duplicates)):
            axis._group = None
        if not dist.is_initialized():  # whoever ended the default group ended all
            return
        if after_failure:
            groups = [group for group in groups if dist.get_backend(group) == "gloo"]
            threading.Thread(target=_outlive, args=(groups, self._timeout or default_pg_timeout), daemon=True).start()
        for group in groups:
            dist.destroy_process_group(group)

    def _create(self, rows: list[list[int]], backend: str | None = None) -> ProcessGroup:
        group = _create(rows, self._timeout, backend)
        self._groups.append(group)
        return group

    def __enter__(self) -> Self:
        self._reopened = not self._groups  # after a run, whose parameters may stay sharded
        self.open()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(keep_sharding=self._reopened, after_failure=error is not None)

    def __repr__(self) -> str:
        if not self.is_divided:
            return f"SequenceMesh(dp={self.dp.size}, sp={self.sp.size})"
        return f"SequenceMesh(dp={self.dp.size}, ring={self.ring.size}, ulysses={self.ulysses.size})"


@contextmanager
def host_group(timeout: timedelta, in_background: bool = False) -> Iterator[ProcessGroup]:
    """A gloo group of all ranks, destroyed on leaving, which waits for nobody; collective over all ranks to enter.

    Args:
        timeout: How long its collectives may wait for a rank.
        in_background: A thread beside the main one uses it, in which order nobody knows: see `is_in_background`.
    """
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=_BACKGROUND if in_background else None)
    assert group is not None
    try:
        yield group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(group)


def is_in_background(group: ProcessGroup) -> bool:
    """Whether a group's collectives tell nothing of how far its rank has come, since another thread begins them."""
    return bool(group.group_desc == _BACKGROUND)


def check_sizes(world_size: int, sp_size: int, ulysses_size: int | None = None) -> None:
    """Raises a ``ValueError`` that names the sizes that would work unless the ranks fall into whole groups."""
    if world_size % sp_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        named = f"sp_size={sp_size}"
        if ulysses_size is not None:
            named = f"ulysses_size={ulysses_size} x ring_size={sp_size // ulysses_size}"
        raise ValueError(
            f"{world_size} devices cannot be split into sequence-parallel groups of {sp_size} ({named}). Choose sizes "
            f"whose product is one of {divisors}, or a number of devices that is a multiple of {sp_size}."
        )


def _rows(ranks: torch.Tensor) -> list[list[int]]:
    """The ranks of each group along the last dim."""
    rows: list[list[int]] = ranks.reshape(-1, ranks.shape[-1]).tolist()
    return rows


def _axis(name: str, rows: list[list[int]]) -> Axis:
    me = dist.get_rank()
    mine = next(row for row in rows if me in row)
    return Axis(name, None, tuple(mine), mine.index(me))


def _create(rows: list[list[int]], timeout: timedelta | None, backend: str | None = None) -> ProcessGroup:
    """Creates the groups of all rows and returns the one that holds this rank."""
    # Every rank creates every group, in the same order, as torch.distributed requires.
    group: ProcessGroup | None = dist.new_subgroups_by_enumeration(rows, timeout=timeout, backend=backend)[0]
    assert group is not None  # the rows partition the world
    return group


def _outlive(groups: list[ProcessGroup], timeout: timedelta) -> None:
    """Keeps destroyed groups until no collective of theirs is pending: gloo's, when freed, wait for those."""
    time.sleep(timeout.total_seconds())
    groups.clear()
