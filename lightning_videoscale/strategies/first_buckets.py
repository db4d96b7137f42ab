"""The memory of DDP's first buckets, which the second step must not find taken."""

from __future__ import annotations

import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_videoscale.compat.torch.data_parallel import has_new_buckets

_PATIENCE, _PAUSE = 1.0, 0.01
"""Seconds. NCCL's thread looks every tenth of a second; who else holds a gradient may do so for ever."""


class FirstBuckets:
    """Waits until the buckets of DDP's first step are gone, once it has made others in the second.

    NCCL's own thread holds what was exchanged until it has seen that the device is done. Where the host is ahead of it,
    the first buckets would lie beside the new ones and all activations through the second step: as much again as all
    gradients, and where M_mem leaves no room for that, the end of the run.
    """

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    def note(self, model: DistributedDataParallel) -> None:
        """Takes a step's buckets for the first, after its backward, unless there were others since."""
        if not has_new_buckets(model):
            gradients = (p.grad for p in model.parameters() if p.grad is not None)
            self._storages = list({StorageWeakRef(g.untyped_storage()) for g in gradients})

    def await_release(self, model: DistributedDataParallel, device: torch.device) -> None:
        """Waits for their memory, once, where others have taken their place; before backward, without old gradients."""
        if not self._storages or not has_new_buckets(model):
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.monotonic() + _PATIENCE
        while not all(storage.expired() for storage in self._storages) and time.monotonic() < end:
            time.sleep(_PAUSE)
        self._storages = []
