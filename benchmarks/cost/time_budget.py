"""How far micro-batches that `TimeBudget` makes are from the time that they are to take.

    python benchmarks/cost/time_budget.py

The step of a Wan is measured over a grid, as ``budget="auto"`` does before a training, and modelled. Then the budget of
a target makes a micro-batch of each of other lengths, 1 560 to 75 600 tokens, and these are measured. The target is a
multiple of the longest sample's time: what is left of it is less than a sample, which ``samples_error`` shows apart.
``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, trainer_with
from lightning_videoscale import benchmark_shapes
from lightning_videoscale.cost import ShapeMatrix, StepTimeModel, TimeBudget
from lightning_videoscale.cost.benchmark.grid import Cell
from lightning_videoscale.cost.benchmark.measure_shapes import measure_shapes
from lightning_videoscale.cost.benchmark.within_fit import within_fit
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning.shapes import ClipShape

SIZES = [(60, 104), (90, 160)]  # 1 560 and 3 600 tokens a frame of latents
FITTED = [ClipShape(frames, *size, True) for size in SIZES for frames in (1, 3, 7, 13, 21)]
HELD_OUT = [ClipShape(frames, *size, True) for size in SIZES for frames in (1, 2, 5, 9, 11, 15, 17, 19, 21)]
TINY_FITTED = [ClipShape(frames, 8, 8, True) for frames in (1, 3, 5)]
TINY_HELD_OUT = [ClipShape(frames, 8, 8, True) for frames in (1, 2, 4, 5)]


def tokens_of(shape: ClipShape) -> int:
    return int(GEOMETRIES["wan2.1"].sequence_length(*shape[:3], latents=True))


def measured(cells: list[Cell], module: RectifiedFlow, tiny: bool, seconds: float) -> ShapeMatrix:
    """What steps of these micro-batches take."""
    trainer, found = trainer_with(1, tiny, max_steps=1), []
    cells = sorted(cells, key=lambda cell: cell.tokens)
    run = lambda: found.append(measure_shapes(trainer, cells, RandomBatches(), seconds, progress=False))  # noqa: E731
    within_fit(trainer, module, None, run)
    return found[0]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--layers", type=int, default=10, help="of the 30 of Wan-1.3B")
    parser.add_argument("--target", type=float, default=4.0, help="in times of the longest sample")
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell, beside its first run")
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    model = TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    fitted, held_out = (TINY_FITTED, TINY_HELD_OUT) if options.tiny else (FITTED, HELD_OUT)
    longest = max(map(tokens_of, held_out))
    matrix = benchmark_shapes(
        trainer_with(1, options.tiny, max_steps=1), RectifiedFlow(model), fitted, max_shapes=len(fitted),
        max_tokens=4 * longest, seconds=options.seconds, progress=False,
    )  # fmt: skip
    step_time = StepTimeModel.fit(matrix.measurements)
    target = options.target * float(step_time.predict(1, longest))
    budget = TimeBudget(m_mem=8 * longest, target_sync=target, step_time=step_time)
    cells = [Cell(shape, tokens_of(shape), budget.batch_size(tokens_of(shape))) for shape in held_out]
    rows = [row_of(cell, budget) for cell in measured(cells, RectifiedFlow(model), options.tiny, options.seconds).rows]
    for row in rows:
        print(row)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    settings = {
        "dry_run": options.tiny, "model": model, "precision": "bf16-mixed", "activation_checkpointing": True,
        "seconds_per_cell": options.seconds, "longest": longest, "target_in_longest_samples": options.target,
        "target_seconds": target, "median_error": statistics.median(errors), "worst_error": max(errors),
        "additive": vars(step_time.additive), "floor": step_time.floor,
    }  # fmt: skip
    print(f"target {target:.3f} s: median error {settings['median_error']:.3f}, worst {settings['worst_error']:.3f}")
    output = options.output or provenance.path("cost", "time_budget")
    provenance.write(output, "cost/time_budget", commit, settings, rows)
    print(f"written to {output}")


def row_of(row: Any, budget: TimeBudget) -> dict[str, Any]:
    """One micro-batch: how far its time is from the target, and from what was predicted of so many samples."""
    predicted = budget.cost(row.samples, row.sequence_length)
    known = row.seconds is not None
    return {
        "sequence_length": row.sequence_length,
        "samples": row.samples,
        "seconds": row.seconds,
        "error": row.seconds / budget.target_sync - 1 if known else None,
        "predicted_seconds": predicted,
        "prediction_error": row.seconds / predicted - 1 if known else None,
        "samples_error": predicted / budget.target_sync - 1,
        "outcome": row.outcome,
    }


if __name__ == "__main__":
    main()
