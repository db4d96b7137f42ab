"""Checkpoints that are written while training goes on: `BackgroundSaves`.

Training waits until each rank has copied its share into host memory. A thread of each rank writes it, in a process
group of its own. This is torch's ``async_save`` but for one thing: its future ends when the tensors are written, and a
checkpoint is whole when it has its name, which all ranks have to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from lightning_videoscale.parallel.mesh import host_group
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.folder import write_checkpoint
from lightning_videoscale.strategies.checkpoints.places import CheckpointPlace, remove
from lightning_videoscale.strategies.checkpoints.shares import RankAssignment

_SHORT = 0.05  # s of waiting that nobody needs to hear of


class BackgroundSaves:
    """Writes one checkpoint at a time in a thread; collective over all ranks to create, as are its methods."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        self._groups = ExitStack()
        self._group = self._groups.enter_context(host_group(timeout, in_background=True))
        self._save: _Save | None = None

    def save(self, path: str, place: CheckpointPlace, tensors: dict[str, Any], rest: bytes) -> None:
        """Copies what this rank writes and returns; a checkpoint that is still being written is waited for first.

        Raises:
            CheckpointError: As `wait` does, of the checkpoint before.
        """
        self.wait(f"before {path} is saved")
        staged = BlockingAsyncStager().stage(own_share(tensors))
        self._save = _Save(path, place, staged, rest, self._group, self._device)
        self._save.start()

    def remove(self, path: str) -> None:
        """Removes a checkpoint, but never before the one that is being written is whole; on rank 0 alone."""
        if self._save is None or not self._save.removes_later(path):
            remove(path)

    def wait(self, why: str) -> None:
        """Waits until the checkpoint under way is whole.

        Raises:
            CheckpointError: On all ranks, if any of them could not write its share or takes longer than the timeout,
                with these ranks.
        """
        save, self._save = self._save, None
        if save is None:
            return
        start = time.monotonic()
        save.join(self._timeout.total_seconds())
        waited = time.monotonic() - start
        everyone = gather_over_ranks((save.is_alive(), save.has_written, save.error))
        if waited > _SHORT:
            rank_zero_info(f"Waited {waited:.1f} s for the checkpoint {save.path} to be whole, {why}.")
        missing = [rank for rank, (unfinished, written, _) in enumerate(everyone) if unfinished and not written]
        if any(unfinished for unfinished, _, _ in everyone):
            what = (
                f"ranks {missing} have not written their share" if missing else "rank 0 has not put it into its place"
            )
            raise CheckpointError(
                f"The checkpoint {save.path} is not whole {self._timeout} after training began to wait for it: {what}. "
                "See whether that store is slow, or take a longer timeout= of the strategy. The checkpoint before is "
                "as it was."
            )
        errors = {rank: error for rank, (_, _, error) in enumerate(everyone) if error}
        if errors:
            own = {rank: error for rank, error in errors.items() if not everyone[rank][1]} or errors
            rank, error = next(iter(own.items()))
            raise CheckpointError(
                f"The checkpoint {save.path} could not be written in the background. Ranks {list(own)} failed, rank "
                f"{rank} with: {error}"
            )

    def close(self, failed: bool) -> None:
        """Waits for what is being written, and closes the process group.

        Args:
            failed: After an exception, when peers may be gone; nothing is waited for then.

        Raises:
            CheckpointError: As `wait` does.
        """
        with self._groups:
            if not failed:
                self.wait("before training ends")


class _Save(threading.Thread):
    """A checkpoint that is being written, whether this rank has written its share, and what went wrong here."""

    def __init__(
        self,
        path: str,
        place: CheckpointPlace,
        tensors: dict[str, Any],
        rest: bytes,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        # A daemon: where a store does not answer, the process must be able to end.
        super().__init__(name="checkpoint", daemon=True)
        self.path, self.has_written, self.error = path, False, ""
        self._place, self._tensors, self._rest = place, tensors, rest
        self._group, self._device = group, device
        self._lock = threading.Lock()
        self._is_whole = False
        self._later: list[str] = []

    def run(self) -> None:
        """Writes it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first one
        try:
            write_checkpoint(self._place, self._tensors, self._rest, self._group, self._note_written)
            with self._lock:
                self._is_whole = True
            for path in self._later:
                remove(path)
        except BaseException as error:  # whatever it is, the main thread has to hear of it
            self.error = f"{type(error).__name__}: {error}"
        self._tensors, self._rest = {}, b""

    def removes_later(self, path: str) -> bool:
        """Takes note of what goes when this checkpoint is whole; False if it is, so that nobody would look."""
        with self._lock:
            if not self._is_whole:
                self._later.append(path)
            return not self._is_whole

    def _note_written(self) -> None:
        self.has_written = True


def own_share(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns nested dicts without those tensors that other ranks write, of which this rank has the same.

    So ranks that hold copies, as under DDP, copy the model once into the memory of their hosts and not once each.
    Collective over all ranks.
    """
    mine = {name: value for name, value in _leaves(tensors) if not isinstance(value, DTensor)}
    everyone = gather_over_ranks(list(mine))
    common = set(mine).intersection(*everyone)
    shares, rank = RankAssignment(len(everyone)), dist.get_rank()
    others = {name for name in sorted(common) if shares.next(mine[name].numel()) != rank}
    return _without(tensors, others)


_Name = tuple[str, ...]


def _leaves(values: dict[str, Any], place: _Name = ()) -> Iterator[tuple[_Name, Tensor]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*place, name))
        else:
            yield (*place, name), value


def _without(values: dict[str, Any], gone: set[_Name], place: _Name = ()) -> dict[str, Any]:
    return {
        name: _without(value, gone, (*place, name)) if isinstance(value, dict) else value
        for name, value in values.items()
        if (*place, name) not in gone
    }
