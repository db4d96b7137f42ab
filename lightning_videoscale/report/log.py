"""The log of a run: one JSON object per line, appended while it trains, so that a report outlives a crash.

A callback hands in what it found with `record(trainer, kind, fields)`. Every record has ``v`` (version of this schema),
``kind``, ``step`` (optimizer steps done) and ``time`` (seconds since 1970), and by kind:

==========  ============================================================================================================
kind        fields
==========  ============================================================================================================
start       A `fit` begins: ``settings``, ``versions``, ``machine`` and ``exchange``, each a flat dict; ``callbacks``,
            class names; ``module``, its class name; ``parameters``, how many.
plan        The data's planner is new or changed: ``epoch``, ``balance``, ``dp_size``, ``micro_batches``,
            ``loss_weighting``, ``loss_normalization``, ``seed``, ``budget`` {m_mem, m_comp (null: no limit), p},
            ``step_time`` (`StepTimeModel.to_dict()`, or null).
window      Some optimizer steps, all ranks: ``steps``; ``seconds`` they took, validation, checkpoints and logging left
            out; ``tokens`` and ``samples``, a sequence-parallel group counted once, fillers not; one number per step in
            ``cv_step`` ((max - min) / max over data-parallel ranks of their work, `StepTimes.work`), ``compute_cv``
            (std / mean of B * S²) and ``cost_cv`` (std / mean of predicted cost); ``slowest_seconds``, work of the
            slowest rank of each step, added up, and ``idle_seconds``, what the mean rank has less, or of each
            micro-batch if ranks wait for each other ``in_slots``, as under FSDP2; ``ranks``, seconds
            of every global rank by field of `StepTimes`; ``batches``, rows of [frames, height, width, S, B,
            micro-batches, of them fillers, median seconds of work]. Null where the batches do not tell. ``loss``, the
            mean over samples and ranks of what ``training_step`` returned, one micro-batch late: the window's last one
            counts in the next. Null where it returned none, and where ``loss_is_finite`` is false: one of them is NaN
            or infinite.
            ``slowdowns``, of every global rank, compute time over that of a healthy rank for the same work;
            ``even_idle_seconds``, ``idle_seconds`` if all ranks were as fast as a healthy one.
samples     Of the shards to train on: ``indexed``, samples; ``refused``, members that cannot be used, the first of them
            as rows of [shard, member, reason] in ``first_refused``; ``too_small``, samples below one patch;
            ``without_caption``.
loading     With a window, of `VideoDataModule`: ``workers``, per global rank a row for each worker since the last
            record, [samples, left out, seconds reading, decoding, waiting for the training]; ``in_process``, whether
            there are none and the row is that of the training process; ``left_out``, rows of [sample or shard, reason],
            each when it is left out first; a rank names eight at a time.
val_loss    A validation is over: ``losses`` {name: value}, the metrics with "loss" and a word like "val" in them.
memory      `MemoryMonitor`: ``allocated_gib``, ``reserved_gib``, ``peak_gib``, ``fragmentation``, and where known
            ``fits_tokens``, as many as a micro-batch may have, and ``headroom_tokens``, what the window's largest has
            less; each the worst of all ranks. ``overhead_tokens``, where samples count as so many more in these two.
bottleneck  `BottleneckAnalyzer`: ``name``, ``share`` of the step time in [0, 1], ``figure`` and ``advice``, sentences.
budget      `BudgetRecalibrator`: ``adopted``, whether budgets change; ``reason``, a sentence; ``m_mem``, ``m_comp``,
            ``p`` as they are from then on. A `TimeBudget` has ``target_sync`` in the place of ``m_comp``.
graphs      With a window, where networks run by CUDA graphs: forward passes of rank 0 since the start, ``replayed``,
            ``eager`` and ``busy``; ``captured``, kinds of calls; ``bytes`` of memory.
injection   `FusedKernels`: ``model``; ``kernels``, what runs them; ``replaced`` and ``skipped``, rows of [path, class
            name, what or why].
schedules   Of ``schedule="auto"``, when they change: ``chosen`` {kind of layer: schedule, and what it was chosen by}.
end         `fit` is over: ``status`` (completed, interrupted or failed); ``error``, where it did not complete.
==========  ============================================================================================================

Readers skip kinds that they do not know, so that a callback of yours may record its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

LOG_NAME = "run_log.jsonl"
VERSION = 1


class RunLog:
    """Appends records to a file. A record that cannot be written is lost with one warning, and nothing is raised.

    The first record is that of the start: what comes earlier, from callbacks that begin before, is written after it.

    Args:
        folder: Where the file `LOG_NAME` lies; made with the first record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._early: list[str] | None = []
        self._has_failed = False

    def append(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Writes one record, which is in the operating system's hands when this returns."""
        try:
            line = json.dumps({"v": VERSION, "kind": kind, "step": step, "time": time.time(), **_plain(fields)}) + "\n"
            if self._early is None:
                self._write(line)
            elif kind != "start":
                self._early.append(line)
            else:
                early, self._early = self._early, None
                self._write("".join([line, *early]))
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                rank_zero_warn(f"The run log in {self.folder} cannot be written, training goes on: {error!r}")

    def _write(self, lines: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Opened for every record: one in a minute or so, and nothing is left open or unwritten by a kill.
        with (self.folder / LOG_NAME).open("ab+") as file:
            # A line that a kill cut short must not swallow the first record of the next run.
            file.write(("\n" if _is_cut_short(file) else "").encode() + lines.encode())


@runtime_checkable
class KeepsRunLog(Protocol):
    """A callback that owns the run's log: `RunReport`."""

    @property
    def run_log(self) -> RunLog | None:
        """The log; None on other ranks than 0, before the Trainer's setup, and under ``fast_dev_run``."""


def record(trainer: pl.Trainer, kind: str, fields: Mapping[str, Any]) -> None:
    """Hands a finding to the run's log; does nothing where no callback keeps one.

    May be called on any rank from the strategy's setup on; rank 0's call is written. Never raises.

    Args:
        trainer: The Trainer that runs.
        kind: What the record is, see the module's table.
        fields: Numbers, strings, lists and dicts; tensors and numpy's scalars and arrays will do. What is not finite
            becomes null.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, KeepsRunLog) and callback.run_log is not None:
            callback.run_log.append(kind, trainer.global_step, fields)


def _is_cut_short(file: BinaryIO) -> bool:
    """Whether a file that is open for reading ends in the midst of a line."""
    if file.seek(0, SEEK_END) == 0:
        return False
    file.seek(-1, SEEK_END)
    return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
