"""Buffers that training writes, such as BatchNorm's statistics: rank 0's, as under Lightning's DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_videoscale.compat.torch.modules import buffers_of, non_persistent_buffers
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.parent import StrategyPart


class SharedBuffers(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`.

    Ranks with other batches write other values. A checkpoint holds rank 0's, and so do all ranks while they validate,
    test and predict, and after training. In between, each rank goes on with its own.
    """

    @override
    def on_validation_start(self) -> None:
        self._share_buffers()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._share_buffers()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self._share_buffers()
        super().on_predict_start()

    @override
    def on_train_end(self) -> None:
        self._share_buffers()
        super().on_train_end()

    def _share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers; collective over them."""
        if self.world_size == 1:
            return
        # Others are in no checkpoint: tables that each rank makes for the shapes that it sees, and when it sees them.
        persistent = {
            (path, name): buffer
            for path, module in self._module.named_modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in non_persistent_buffers(module)
            if not (isinstance(buffer, DTensor) or buffer.is_meta)
        }
        everyone = gather_over_ranks({name: f"{x.dtype} {tuple(x.shape)}" for name, x in persistent.items()})
        for name in everyone[0]:
            if any(theirs.get(name) != everyone[0][name] for theirs in everyone):
                continue
            buffer = persistent[name]
            first = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.root_device).copy_(buffer)
            dist.broadcast(first, 0)
            if not first.equal(buffer.to(self.root_device)):  # one that is expanded could not be written
                buffer.copy_(first)
