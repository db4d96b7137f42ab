"""What a strategy has of the mesh of ranks, from its making to its closing: `HasMesh`."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_videoscale.compat.lightning import set_device_mesh, timeout_of
from lightning_videoscale.parallel import Agreement, SequenceMesh
from lightning_videoscale.parallel.layout.divide import divide_mesh
from lightning_videoscale.parallel.mesh import host_group
from lightning_videoscale.parallel.schedules import PENDING
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.parallel.transport import Transport, create_transport
from lightning_videoscale.strategies.batches.sharing import BatchSharing
from lightning_videoscale.strategies.mesh.division import (
    clips_of,
    networks_to_split,
    objection_to_rings,
    size_of_group,
)
from lightning_videoscale.strategies.parent import StrategyPart
from lightning_videoscale.strategies.settings import SequenceParallelSettings

_log = logging.getLogger(__name__)


class HasMesh(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`.

    Attributes:
        transport: What sends messages; None until the mesh is divided.
    """

    schedule_choices: ScheduleChoices

    def _init_mesh(self, settings: SequenceParallelSettings) -> None:
        self._settings = settings
        self._mesh: SequenceMesh | None = None
        self._devices_per_node = 1
        self.transport: Transport | None = None
        self._sharing: BatchSharing | None = None
        self._losses: Agreement | None = None

    @property
    def mesh(self) -> SequenceMesh:
        """The mesh of ranks; exists once the Trainer has set the environment up.

        Its axes ulysses and ring, where they are to be chosen, and under ``sp_size="auto"`` all of it, exist once the
        strategy is set up: after the DataModule's ``setup`` and ``configure_model``, and before any loader.

        Raises:
            RuntimeError: If asked for earlier.
        """
        if self._mesh is None:
            when = (
                "environment" if self._settings.sp_size != "auto" else "strategy, as sp_size='auto' asks the data first"
            )
            raise RuntimeError(
                f"The mesh exists from the Trainer's setup of the {when}; it was asked for earlier, or in a process "
                "that has no rank, as a notebook's. There, save checkpoints within fit, by ModelCheckpoint."
            )
        return self._mesh

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch stream; equal on all ranks of a sequence-parallel group."""
        return self.mesh.dp.rank

    @property
    def data_parallel_size(self) -> int:
        """Number of distinct batch streams."""
        return self.mesh.dp.size

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that work on one batch together."""
        return self.mesh.sp.size

    def host_group(self, timeout: timedelta) -> AbstractContextManager[dist.ProcessGroup]:
        """A gloo group of all ranks, closed on leaving; see `DataParallelTopology`."""
        return host_group(timeout)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over ranks as the parent does, which rounds means of whole numbers down.

        `LightningModule.log` divides by such a mean: that of the ranks' numbers of samples.
        """
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]  # the Lightning strategy has one

    # -- setting up ----------------------------------------------------------------------------------------------

    def _make_mesh(self, devices_per_node: int, timeout: timedelta | None) -> None:
        """Makes and opens as much of the mesh as is known before the model; collective over all ranks."""
        self._warn_of_order(devices_per_node)
        self._devices_per_node = devices_per_node
        # A Trainer that fits and then tests opens the mesh again: copies of the network go on to be split by it.
        if self._mesh is None and self._settings.sp_size != "auto":
            size, ulysses_size = self._settings.sizes(devices_per_node)
            self._mesh = SequenceMesh(self.root_device.type, ulysses_size=ulysses_size, sp_size=size, timeout=timeout)
        if self._mesh is not None:
            self._open_mesh(self._mesh)

    def _warn_of_order(self, devices_per_node: int) -> None:
        """Groups are made of neighbouring ranks, which belong on one node."""
        if self.local_rank == 0 and self.global_rank != self.node_rank * devices_per_node:
            _log.warning(
                f"Rank {self.global_rank} is rank 0 of node {self.node_rank}, where rank "
                f"{self.node_rank * devices_per_node} is expected: ranks are not numbered node by node, so groups that "
                "belong inside a node span several, and are slow. Leave SLURM's --distribution at block, or write the "
                "hosts of a launcher's list one after the other."
            )

    def _open_mesh(self, mesh: SequenceMesh) -> None:
        mesh.open()
        if mesh.sp.size > 1 and self._sharing is None:
            self._sharing = BatchSharing(mesh, self.root_device)
        if mesh.is_divided:
            self._connect(mesh)
        self._publish(mesh)

    def _complete_mesh(self, module: nn.Module) -> None:
        """Chooses what the user left open, now that heads and lengths are known; collective over all ranks."""
        trainer = self._module.trainer
        if self._mesh is None:
            size = size_of_group(trainer, self._devices_per_node)
            self._mesh = SequenceMesh(self.root_device.type, sp_size=size, timeout=timeout_of(self))
            self._open_mesh(self._mesh)
        if not self._mesh.is_divided:
            divide_mesh(
                self._mesh,
                networks_to_split(module, self._mesh, self._settings),
                clips_of(trainer),
                devices_per_node=self._devices_per_node,
                ring_objection=objection_to_rings(self._settings),
                log=rank_zero_info,
            )
            self._connect(self._mesh)
            self._publish(self._mesh)

    def _connect(self, mesh: SequenceMesh) -> None:
        """Makes what sends messages along the axes of an open, divided mesh."""
        if self.transport is None:
            timeout, pending = timeout_of(self) or default_pg_timeout, PENDING[self.schedule_choices.schedule]
            self.transport = create_transport(self._settings.transport, mesh, self.root_device, timeout, pending)
            if mesh.sp.size > 1:
                self._losses = Agreement(mesh, self.transport)
        carrier = self.transport.carrier(mesh.ring if mesh.ring.size > 1 else mesh.ulysses)
        rank_zero_info(
            f"Sequence parallelism: {mesh} over {self.world_size} ranks, transport {self.transport.name!r}"
            + (f" (the ring's blocks go by {carrier!r})." if carrier != self.transport.name else ".")
        )

    def _publish(self, mesh: SequenceMesh) -> None:
        """Lets the LightningModule see the mesh."""
        set_device_mesh(self._module, mesh.device_mesh)

    def _close_mesh(self, after_failure: bool) -> None:
        """Closes what the ranks exchange by; parameters that FSDP2 shards over replicas keep their groups."""
        if self.transport is not None and not after_failure:  # or this would wait for peers that may be gone
            self.transport.close()
        if self._mesh is not None:
            self._mesh.close(keep_sharding=True, after_failure=after_failure)
