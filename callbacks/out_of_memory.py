"""What is known of a micro-batch that did not fit into memory, kept beside the checkpoints for the restart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec  # type: ignore[import-untyped]
import lightning.pytorch as pl
import torch

from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.timing import MicroBatchLoad
from lightning_videoscale.topology import topology_of

_KEPT_FREE = 0.1
"""Share by which M_mem goes below the tokens that did not fit."""


@dataclass(frozen=True)
class OutOfMemory:
    """One micro-batch on one rank.

    Attributes:
        step: Optimizer steps done before.
        rank: Global rank.
        shape: Frames, height and width of the batch; empty where its ``meta`` has none.
        samples: Batch size B.
        sequence_length: Tokens S of a sample.
        m_mem: The memory budget that the batch was made by, in tokens.
        allocated_gib: In tensors when it failed; None where the device does not tell.
        capacity_gib: Memory of the device; likewise.
        machine: Device, ranks and sequence-parallel ranks: on others, as much memory is left as may be.
        overhead_tokens: What that budget counted of every sample beside its tokens.
    """

    step: int
    rank: int
    shape: tuple[int, ...]
    samples: int
    sequence_length: int
    m_mem: float
    allocated_gib: float | None
    capacity_gib: float | None
    machine: tuple[str, int, int]
    overhead_tokens: float = 0.0  # notes of earlier releases have none

    @classmethod
    def of(cls, trainer: pl.Trainer, load: MicroBatchLoad, budget: Budget) -> OutOfMemory:
        """Describes the micro-batch under way on this rank."""
        device, gib = trainer.strategy.root_device, 2**30
        on_cuda = device.type == "cuda"
        return cls(
            step=trainer.global_step,
            rank=trainer.global_rank,
            shape=(load.frames, load.height, load.width) if load.frames else (),
            samples=load.samples,
            sequence_length=load.sequence_length,
            m_mem=budget.m_mem,
            allocated_gib=torch.cuda.max_memory_allocated(device) / gib if on_cuda else None,
            capacity_gib=torch.cuda.get_device_properties(device).total_memory / gib if on_cuda else None,
            machine=machine_of(trainer),
            overhead_tokens=budget.overhead_tokens,
        )

    @property
    def tokens(self) -> float:
        """B * (S + overhead_tokens): what the batch takes of M_mem."""
        return self.samples * (self.sequence_length + self.overhead_tokens)

    @property
    def m_mem_after(self) -> float:
        """The memory budget that leaves such a batch out."""
        return float(int(self.tokens * (1 - _KEPT_FREE)))

    def __str__(self) -> str:
        """A sentence with the figures, and one with what comes next."""
        shape = f" of {'x'.join(map(str, self.shape))}" if self.shape else ""
        gib = ""
        if self.allocated_gib is not None and self.capacity_gib is not None:
            gib = f", with a peak of {self.allocated_gib:.1f} of {self.capacity_gib:.1f} GiB"
        counted = f"(S + {self.overhead_tokens:g})" if self.overhead_tokens else "S"
        what = (
            f"Out of memory on rank {self.rank} at step {self.step}: B = {self.samples} samples{shape} of S = "
            f"{self.sequence_length} tokens, B * {counted} = {self.tokens:.0f}, M_mem = {self.m_mem:.0f}{gib}. "
        )
        if self.samples == 1:
            return what + (
                "One sample alone does not fit: use a larger sequence-parallel group, activation checkpointing, or "
                "shorter clips."
            )
        return what + f"A restart from the last checkpoint lowers M_mem to {self.m_mem_after:.0f}."


def machine_of(trainer: pl.Trainer) -> tuple[str, int, int]:
    """Device, ranks and sequence-parallel ranks, on which the memory that is left depends."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, trainer.world_size, topology_of(trainer).sequence_parallel_size


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether a device had no memory left: for a tensor, or for a library's own use."""
    return isinstance(exception, torch.OutOfMemoryError) or (
        isinstance(exception, RuntimeError) and "out of memory" in str(exception).lower()
    )


def is_in_micro_batch(trainer: pl.Trainer) -> bool:
    """Whether a micro-batch is computed now, and neither a validation nor what callbacks do once it is done."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.training and bool(batches.started > batches.processed)


def folders_of(trainer: pl.Trainer) -> list[str]:
    """Where notes are kept: beside the checkpoints to come, first, and beside the one that the run goes on from."""
    own = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    resumed = [str(trainer.ckpt_path).rstrip("/").rpartition("/")[0] or "."] if trainer.ckpt_path else []
    return list(dict.fromkeys([str(own), *resumed]))


def keep(incident: OutOfMemory, folder: str) -> None:
    """Writes a note into a folder, local or behind a URL."""
    files, path = fsspec.core.url_to_fs(folder)
    files.makedirs(path, exist_ok=True)
    with files.open(f"{path}/out_of_memory-step={incident.step}-rank={incident.rank}.json", "w") as file:
        json.dump(asdict(incident), file)


def kept_in(folders: Iterable[str]) -> list[OutOfMemory]:
    """Returns the notes in some folders; one that a crash cut short is left out."""
    found = []
    for folder in folders:
        files, path = fsspec.core.url_to_fs(folder)
        # No glob of the whole path, whose folders may have brackets in their names.
        names = files.ls(path, detail=False) if files.isdir(path) else []
        for name in sorted(name for name in names if PurePosixPath(name).match("out_of_memory-step=*.json")):
            try:
                fields: dict[str, Any] = json.loads(files.cat_file(name))
                lists = {key: tuple(fields[key]) for key in ("shape", "machine")}
                found.append(OutOfMemory(**{**fields, **lists}))
            except (ValueError, KeyError, TypeError):
                continue
    return found
