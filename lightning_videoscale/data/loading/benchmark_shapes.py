"""`benchmark_shapes`: what training steps take, for a Trainer that has not begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl

from lightning_videoscale.cost import ShapeMatrix
from lightning_videoscale.cost.benchmark.grid import Cell, SyntheticBatches, spread_over_shapes
from lightning_videoscale.cost.benchmark.measure_shapes import measure_shapes
from lightning_videoscale.cost.benchmark.within_fit import within_fit
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.loading.datamodule import VideoDataModule
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning.shapes import ClipShape


def benchmark_shapes(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    shapes: VideoDataModule | Sequence[ClipShape],
    *,
    batches: SyntheticBatches | None = None,
    geometry: str | ModelGeometry = "wan2.1",
    max_shapes: int = 12,
    max_tokens: int | None = None,
    seconds: float = 1.0,
    progress: bool = True,
    file: str | Path | None = None,
) -> ShapeMatrix:
    """Measures time and memory of training steps over (B, S), with the real module under the real strategy.

    Everything is set up as for ``trainer.fit``, forward and backward run on synthetic batches, and nothing is trained:
    weights and optimizers are afterwards what they were. Compute is told from waiting for other ranks (see
    `lightning_videoscale.timing`), out of memory is a result like any other. Collective over all ranks.

    Args:
        trainer: The Trainer of the training to come, or one with the same strategy, devices and precision. Its loggers
            and checkpoint callbacks rest meanwhile; what fails in a callback's ``on_fit_end`` is a warning.
        module: What will be trained; with automatic optimization.
        shapes: The data, or the shapes of its samples.
        batches: Makes the batches. None: one sample of each shape, repeated, where the data is given; else random
            latents (16 channels) or pixels with an empty caption.
        geometry: How many tokens a shape has, where shapes are given; the data knows its own.
        max_shapes: Sequence lengths to measure at most.
        max_tokens: Tokens B * S to measure at most; None: those of two samples of the longest shape. Sequences of
            20 000 tokens and more are measured in up to 8 samples within that.
        seconds: Time per shape, about, beside its first run; once more at the end where its repeats differed.
        progress: Whether rank 0 draws a bar.
        file: Where rank 0 writes the matrix, such as ``"shapes.json"``. Until it is whole, its rows are in
            ``shapes.json.part``, from which the next call in the same setting goes on if this one is ended.

    Returns:
        The matrix, the same on all ranks: ``StepTimeModel.fit(matrix.measurements)``,
        ``MemoryModel.fit(matrix.measurements)``; ``ShapeMatrix.load("shapes.json")`` reads it back.

    Raises:
        ValueError: If there are no shapes, the module optimizes manually, or the rows that an earlier call has left are
            of another setting.
        OSError: If the file cannot be written.
    """
    found: list[ShapeMatrix] = []

    def run() -> None:
        cells, make = _grid_and_batches(shapes, batches, geometry, max_shapes, max_tokens)
        found.append(measure_shapes(trainer, cells, make, seconds, progress, file))

    within_fit(trainer, module, shapes if isinstance(shapes, VideoDataModule) else None, run)
    return found[0]


def _grid_and_batches(
    shapes: VideoDataModule | Sequence[ClipShape],
    batches: SyntheticBatches | None,
    geometry: str | ModelGeometry,
    max_shapes: int,
    max_tokens: int | None,
) -> tuple[list[Cell], SyntheticBatches]:
    if isinstance(shapes, VideoDataModule):
        table, own = shapes.training_shapes()
        cells = spread_over_shapes(table.shapes, table.sequence_lengths.tolist(), max_shapes, max_tokens)
        return cells, batches if batches is not None else own
    if isinstance(geometry, str):
        geometry = GEOMETRIES[geometry]
    lengths = [geometry.sequence_length(f, h, w, latents=latents) for f, h, w, latents in shapes]
    return spread_over_shapes(shapes, lengths, max_shapes, max_tokens), batches or RandomBatches()
