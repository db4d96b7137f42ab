"""What the loaders of all ranks do: figures of their workers, and samples that they leave out."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.worker_ledger import REASONS, LeftOut, WorkerFigures, WorkerLedger
from lightning_videoscale.timing import StepWindow

_TOLD = 8
"""Left-out samples that a rank names per window: what is more waits for the next, the number counts at once."""


class LoaderWatch:
    """Hands over what a rank's loader did since the last time, as equally many numbers on all ranks.

    Collective to create over the ranks of a Trainer: they agree on the number of workers.

    Args:
        trainer: The Trainer.
        data: Its data; None: there is nothing to watch, on any rank.
    """

    def __init__(self, trainer: pl.Trainer, data: VideoDataModule | None) -> None:
        self._ledger: WorkerLedger | None = None if data is None else data.ledger
        self._workers = 0 if data is None else data.num_workers
        self._most = 0
        self._seen: set[LeftOut] = set()
        if self._ledger is not None:
            workers = torch.tensor(max(self._workers, 1), device=trainer.strategy.root_device)
            self._most = int(trainer.strategy.all_gather(workers).max())
            self._before = self._ledger.figures(self._workers)

    def take(self) -> list[float]:
        """Returns what is news: kinds and numbers of left-out samples, then figures worker by worker."""
        if self._ledger is None:
            return []
        now, before = self._ledger.figures(self._workers), self._before
        figures = [a - b for new, old in zip(now, before, strict=True) for a, b in zip(new, old, strict=True)]
        self._before = now
        told: list[float] = []
        for each in [each for each in self._ledger.left_out() if each not in self._seen][:_TOLD]:
            self._seen.add(each)
            told += _as_numbers(each)
        width = len(WorkerFigures._fields) * self._most
        return [*told, *[-1.0] * (3 * _TOLD - len(told)), *figures, *[-1.0] * (width - len(figures))]

    @property
    def nothing(self) -> list[float]:
        """What `take` returns where it has failed: as many numbers that say nothing."""
        return [] if self._ledger is None else [-1.0] * (3 * _TOLD + len(WorkerFigures._fields) * self._most)

    def fields_of(self, window: StepWindow, first: int) -> dict[str, Any]:
        """Returns the fields of a `loading` record; nothing where nothing is watched.

        Args:
            window: The steps, with what `take` returned on every rank from number ``first`` on.
            first: Numbers before.
        """
        if self._ledger is None:
            return {}
        told, figures = window.values[:, first : first + 3 * _TOLD], window.values[:, first + 3 * _TOLD :]
        left_out = {_of_numbers(row) for row in told.reshape(-1, 3).tolist() if row[2] > 0}
        rows = figures.unflatten(1, (self._most, len(WorkerFigures._fields))).tolist()
        return {
            "in_process": self._workers == 0,
            "workers": [[worker for worker in of_rank if worker[0] >= 0] for of_rank in rows],
            "left_out": sorted(left_out, key=str),
        }


def named(left_out: LeftOut, data: VideoDataModule) -> list[str]:
    """Returns what was left out by name, and why."""
    index = data.index
    what = f"all of {index.shard_name(left_out.shard)}" if left_out.shard is not None else None
    return [what or index.sample_id(left_out.sample or 0), REASONS[left_out.reason]]


def _as_numbers(left_out: LeftOut) -> list[float]:
    is_shard = left_out.shard is not None
    return [float(is_shard), float((left_out.shard if is_shard else left_out.sample) or 0), float(left_out.reason)]


def _of_numbers(row: list[float]) -> LeftOut:
    is_shard, number, reason = (int(value) for value in row)
    return LeftOut(None, number, reason) if is_shard else LeftOut(number, None, reason)
