"""The loop over the grid: every cell is tried, measured, or known not to fit, on all ranks alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_videoscale.compat.deepspeed import full_numel
from lightning_videoscale.compat.names import installed_version
from lightning_videoscale.cost.benchmark.grid import Cell, SyntheticBatches, TrainingBatch
from lightning_videoscale.cost.benchmark.growing_matrix import GrowingMatrix
from lightning_videoscale.cost.benchmark.ranks import Ranks
from lightning_videoscale.cost.benchmark.trainer_steps import RealSteps, real_steps
from lightning_videoscale.cost.matrix import MatrixRow, ShapeMatrix
from lightning_videoscale.cost.memory import MemoryModel
from lightning_videoscale.topology import RunsByGraphs, topology_of

DECISIVE = (
    *("gpu", "world_size", "strategy", "sequence_parallel_size", "graphs", "precision", "module", "parameters"),
    *("activation_checkpointing", "compile", "fused_modules", "recompute_norms"),
)
"""What of the provenance decides over time and memory: matrices that differ in it hold for other runs."""

_REPEATS = (2, 20)
"""Two of a step that is longer than the time for its cell: its own time hardly varies then, and both show whether."""

_STEADY, _STEADY_OF_TWO = 0.1, 0.03
"""Spread up to which the repeats of a cell agree. Of two nothing tells which one was disturbed."""


def measure_shapes(
    trainer: pl.Trainer,
    cells: Sequence[Cell],
    batches: SyntheticBatches,
    seconds: float = 1.0,
    progress: bool = True,
    file: str | Path | None = None,
) -> ShapeMatrix:
    """Measures what training steps take, under a Trainer that is set up; collective over all ranks.

    A cell that is out of memory is a row like any other, and larger batches of its sequence length are left out. Under
    strategies with exchanges in the forward pass (sharded parameters, split sequences), a cell is not tried where the
    peaks so far say that it does not fit. Cells whose repeats differ by more than a tenth, or by 3 % where they are but
    two, are measured once more in the end, the last first: what disturbed them, such as other work on the host, may be
    over then. Where networks run by CUDA graphs, a cell is timed once it has been captured, or will not be.

    Args:
        trainer: A Trainer whose model is wrapped, not in the middle of a step.
        cells: What to measure, by rising tokens.
        batches: Makes the batches.
        seconds: Time per cell, about, beside its first run; 2 repeats at least and 20 at most.
        progress: Whether rank 0 draws a bar.
        file: Where rank 0 writes the matrix. Until it is whole, its rows are in ``FILE.part``, from which the next
            call goes on if this one is ended.

    Raises:
        ValueError: If the module optimizes manually, or ``FILE.part`` is of another setting.
        OSError: If the file cannot be written.
        RuntimeError: If a rank ran out of memory while others are within a step that it has to take part in.
    """
    shown = progress and trainer.is_global_zero
    with real_steps(trainer) as steps, closing(Ranks(trainer)) as ranks:
        capacity = ranks.smallest(steps.capacity_bytes)
        matrix = GrowingMatrix(trainer, provenance_of(trainer), capacity, file)
        full = {row.sequence_length for row in matrix.rows if row.outcome != "measured"}
        with_states = True  # of the optimizers, which no earlier run can have left
        for cell in tqdm(cells, desc="benchmark", unit=" shapes", disable=not shown, leave=False):
            if cell.sequence_length in full or matrix.row_of(cell) is not None:
                continue
            if steps.exchanges_inside and _is_beyond(cell, matrix.rows, capacity):
                row = _row(cell, outcome="not_tried")
            else:
                row = _measure(steps, ranks, cell, batches, seconds, with_states)
            if row.outcome == "measured":
                with_states = False
            else:
                full.add(cell.sequence_length)
            matrix.append(row)
            steps.drop_gradients()
        unsteady = [cell for cell in reversed(cells) if not _is_steady(matrix.row_of(cell), seconds)]
        for cell in tqdm(unsteady, desc="once more", unit=" shapes", disable=not shown, leave=False):
            matrix.improve(_measure(steps, ranks, cell, batches, seconds, with_states=False))
            steps.drop_gradients()
    return matrix.finish()


def provenance_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What a measurement under this Trainer holds for, as rank 0 sees it; collective.

    GPUs may differ by name, and what was measured elsewhere must be so for all ranks or for none.
    """
    module, device = trainer.lightning_module, trainer.strategy.root_device
    seen = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "sequence_parallel_size": topology_of(trainer).sequence_parallel_size,
        "graphs": (isinstance(trainer.strategy, RunsByGraphs) and trainer.strategy.graph_mode) or None,
        "precision": trainer.precision,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(map(full_numel, module.parameters())),
        **_of_networks(trainer),
        "cuda": torch.version.cuda,
        **{name: installed_version(name) for name in ("lightning-videoscale", "torch", "lightning")},
    }
    found: dict[str, Any] = trainer.strategy.broadcast(seen)
    return found


def _of_networks(trainer: pl.Trainer) -> dict[str, Any]:
    """How networks compute, which decides over time and memory as their size does."""
    strategy, modules = trainer.strategy, list(trainer.lightning_module.modules())
    said = strategy.describe() if hasattr(strategy, "describe") else {}
    fused = [vars(module) for module in modules if "kernel_backend" in vars(module)]
    return {
        "activation_checkpointing": said.get("activation checkpointing")
        or any(getattr(module, "gradient_checkpointing", False) is True for module in modules),
        "compile": said.get("compile", False),
        "fused_modules": len(fused),
        "recompute_norms": any(each.get("recompute_norms") for each in fused),
    }


def _measure(
    steps: RealSteps, ranks: Ranks, cell: Cell, batches: SyntheticBatches, seconds: float, with_states: bool
) -> MatrixRow:
    steps.reset_peak()
    tried = _first_step(steps, ranks, cell, batches)
    if tried is None:
        steps.free_memory()
        return _row(cell, outcome="out_of_memory")
    batch, first = tried
    if with_states:
        steps.make_optimizer_states()
    elif not ranks.all(_fits_beside_gradients(steps), "near the end of its memory"):
        steps.free_memory()
        return _row(cell, outcome="not_tried")
    steps.reset_peak()
    # Right after a step that was not reduced: under DDP, its gradients lie beside the buckets.
    steps.run(batch, is_first=False)
    later_peak, later_graphs = steps.peak_bytes, steps.graph_bytes
    if with_states:
        steps.run(batch)  # here DDP makes its buckets anew
    steps.reset_peak()
    repeats = _repeats(seconds, first)
    if is_warm_up := first < seconds or steps.until_graphs > 0:
        for _ in range(steps.until_graphs - 1):
            steps.run(batch)
        steps.read_times()
    before = steps.graph_calls
    for _ in range(repeats if is_warm_up else repeats - 1):
        steps.run(batch)
    times = steps.read_times()
    by_graph = all_by_graph(before, steps.graph_calls)
    if later_peak is not None:
        later_peak += steps.graph_bytes - later_graphs
    mine = [t.work for t in times]
    # What disturbs a step, such as other work on the host, only makes it longer.
    quartile = float(np.quantile(mine, 0.25))
    return _row(
        cell,
        seconds=ranks.median(quartile),
        spread=ranks.largest((max(mine) - min(mine)) / quartile),
        wait_seconds=ranks.median(statistics.median(t.wait for t in times)),
        by_graph=ranks.all(by_graph, "not running by CUDA graphs"),
        peak_bytes=ranks.largest_of(later_peak),
        first_peak_bytes=ranks.largest_of(steps.peak_bytes),
        start_bytes=ranks.largest_of(steps.start_bytes(later_peak)),
    )


def _repeats(seconds: float, of_a_step: float) -> int:
    return min(max(math.ceil(seconds / of_a_step), _REPEATS[0]), _REPEATS[1])


def _is_steady(row: MatrixRow | None, seconds: float) -> bool:
    """Whether the repeats of a cell agree; so does what was not measured."""
    if row is None or row.spread is None or row.seconds is None:
        return True
    return row.spread <= (_STEADY_OF_TWO if _repeats(seconds, row.seconds) == _REPEATS[0] else _STEADY)


def _fits_beside_gradients(steps: RealSteps) -> bool:
    """Whether what the first step took leaves room for gradients, which it had only at the end of its backward."""
    peak, capacity = steps.peak_bytes, steps.capacity_bytes
    return peak is None or capacity is None or peak + steps.gradient_bytes <= capacity


def all_by_graph(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Whether all calls of networks between two counts, as `RunsByGraphs` has them, were replayed."""
    replayed, *others = (after.get(name, 0) - before.get(name, 0) for name in ("replayed", "eager", "busy"))
    return replayed > 0 and not any(others)


def _first_step(
    steps: RealSteps, ranks: Ranks, cell: Cell, batches: SyntheticBatches
) -> tuple[TrainingBatch, float] | None:
    """The batch of a cell and the seconds of a step on it; None if any rank has no memory for either."""
    full = f"out of memory at {cell.samples} samples of {cell.sequence_length} tokens"
    batch = steps.make(batches, cell)
    # Asked before the step, in which a rank that has a batch would wait for one that has none.
    if not ranks.all(batch is not None, full) or batch is None:
        return None
    begin = time.perf_counter()
    if not ranks.all(steps.fits(batch), full):
        return None
    steps.read_times()  # once the device is done
    return batch, ranks.largest(time.perf_counter() - begin)


def _row(cell: Cell, **values: Any) -> MatrixRow:
    frames, height, width, _ = cell.shape
    return MatrixRow(frames, height, width, cell.samples, cell.sequence_length, **values)


def _is_beyond(cell: Cell, rows: Sequence[MatrixRow], capacity: float | None) -> bool:
    """Whether the peaks of smaller cells say that this one does not fit."""
    measurements = ShapeMatrix(tuple(rows)).measurements
    points = {m.samples * m.sequence_length for m in measurements if m.peak_bytes is not None}
    if capacity is None or len(points) < 3:
        return False
    try:
        model = MemoryModel.fit(measurements)
    except ValueError:  # small cells may all take as much, as where gathered weights are the peak
        return False
    return model.predict(cell.samples, cell.sequence_length) * (1 + model.worst_excess) > capacity
