"""Which measured matrix holds for a training: one that is named, one beside the index, or one measured now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.cost.benchmark.measure_shapes import DECISIVE, provenance_of
from lightning_videoscale.cost.matrix import ShapeMatrix


def known_matrix(
    trainer: pl.Trainer | None, named: str | Path | None, beside_index: Path, measure: Callable[[], ShapeMatrix]
) -> tuple[ShapeMatrix | None, str]:
    """Finds what was measured, the same on all ranks; collective where there is a Trainer.

    Returns:
        The matrix, and where it comes from; None, and why there is none.

    Raises:
        ValueError: If the file that was asked for cannot be read.
    """
    matrix, problem = _read(trainer, Path(named or beside_index))
    if named is not None and problem is not None:
        raise ValueError(f"AutoBudget(matrix=...): {problem}")
    if problem is not None and not isinstance(problem, FileNotFoundError):
        rank_zero_warn(f"budget='auto' does not use the matrix beside the index: {problem}")
    differences = [] if matrix is None or trainer is None else matrix.differences(provenance_of(trainer), DECISIVE)
    if named is not None:
        if differences:
            rank_zero_warn(f"{named} was measured in another setting ({'; '.join(differences)}).")
        return matrix, f"by {named}"
    if differences:
        rank_zero_info(f"{beside_index} is of another setting ({'; '.join(differences)}) and is not used.")
    elif matrix is not None and trainer is not None:
        return matrix, f"by {beside_index}"
    if (obstacle := _obstacle(trainer)) is not None:
        return None, f"by the model's size, as {obstacle}"
    rank_zero_info("budget='auto': measuring the shapes of the data, about a minute.")
    measured = measure()
    return measured, f"measured on {len(measured.measurements)} micro-batches"


def _read(trainer: pl.Trainer | None, file: Path) -> tuple[ShapeMatrix | None, Exception | None]:
    """What rank 0 reads, or why it cannot, on all ranks: the file may lie on its node only."""
    found: tuple[ShapeMatrix | None, Exception | None] = None, None
    if trainer is None or trainer.is_global_zero:
        try:
            found = ShapeMatrix.load(file), None
        except (OSError, ValueError) as error:
            found = None, error
    return found if trainer is None else trainer.strategy.broadcast(found)


def _obstacle(trainer: pl.Trainer | None) -> str | None:
    """Why no steps can be measured; a warning with the remedy where there are GPUs."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return "no training is set up"
    if trainer.strategy.root_device.type != "cuda":
        return f"nothing is measured on {trainer.strategy.root_device}"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        return "fast_dev_run is on"
    for holds, why in (
        (not trainer.lightning_module.automatic_optimization, "the module optimizes manually"),
        (not trainer.optimizers, "configure_optimizers asks for the number of steps, before any can be measured"),
        (hasattr(trainer.strategy, "deepspeed_engine"), "DeepSpeed keeps the gradients of steps that are not taken"),
    ):
        if holds:
            rank_zero_warn(f"budget='auto' measures nothing: {why}. Run `videoscale benchmark-shapes` beforehand.")
            return why
    return None
