"""Divides a mesh as is best for the networks that it is to split: `divide_mesh`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_videoscale.parallel.layout.choice import LayoutChoice, choose_layout
from lightning_videoscale.parallel.layout.heads import attention_sizes
from lightning_videoscale.parallel.layout.machines import machine_of
from lightning_videoscale.parallel.mesh import SequenceMesh
from lightning_videoscale.parallel.plan import SplitPlan


def divide_mesh(
    mesh: SequenceMesh,
    networks: Sequence[tuple[nn.Module, SplitPlan]],
    lengths: Mapping[int, int] | None = None,
    *,
    devices_per_node: int | None = None,
    ring_objection: str | None = None,
    log: Callable[[str], None],
) -> LayoutChoice | None:
    """Chooses how the sequence-parallel ranks of a mesh divide, and divides them; collective over all ranks.

    Does nothing where the mesh is divided. Where the heads of no network can be told, all ranks form a Ulysses group.

    Args:
        mesh: The mesh.
        networks: Those to split, with their plans.
        lengths: See `choose_layout`.
        devices_per_node: See `choose_layout`.
        ring_objection: See `choose_layout`.
        log: Is told on rank 0 what was chosen, and why.

    Returns:
        What was chosen, equal on all ranks; None if nothing was.

    Raises:
        ValueError: On every rank, if there are fewer heads than ranks and no ring may run.
    """
    if mesh.is_divided:
        return None
    sizes = [size for network, plan in networks for size in attention_sizes(network, plan)]
    if not sizes:
        mesh.divide(mesh.sp.size)
        if dist.get_rank() == 0:
            names = ", ".join(type(network).__name__ for network, _ in networks)
            log(f"The heads of {names} cannot be told, so all {mesh.sp.size} ranks form a Ulysses group.")
        return None
    costliest = max(sizes, key=lambda size: (size.heads * size.head_dim, size.heads))
    machine = machine_of(torch.cuda.get_device_name() if mesh.device_type == "cuda" else mesh.device_type)
    choice = choose_layout(
        mesh.sp.size,
        costliest.heads,
        costliest.head_dim,
        machine,
        lengths,
        most_ulysses=min(size.heads for size in sizes),
        devices_per_node=devices_per_node,
        ring_objection=ring_objection,
    )
    # Ranks on other GPUs, or with other data, would choose otherwise, and all must divide alike.
    chosen = [choice]
    dist.broadcast_object_list(chosen, 0)
    choice = chosen[0]
    mesh.divide(choice.layout.ulysses)
    if dist.get_rank() == 0:
        log(choice.describe())
    return choice
