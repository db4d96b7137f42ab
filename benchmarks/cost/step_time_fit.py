"""How well the step-time models predict shapes that they were not fitted to, on one GPU.

    python benchmarks/cost/step_time_fit.py --shapes clips.csv    # columns source, width, height, fps, num_frames

Wan-1.3B with random weights, activation checkpointing and bf16-mixed is measured by `benchmark_shapes` over the shapes
of the standard mix. Some sequence lengths are left out of the fit, with all their batch sizes, and predicted.

Takes three minutes on an H200, most of it in the steps of 3 to 12 seconds that every length has at its largest batch.
A call that is ended before keeps its rows beside --matrix, and the next one goes on from there. With --refit RESULT
nothing is measured: the rows of a result are fitted anew, on any machine, and the file is written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, latents_of, trainer_with
from lightning_videoscale import benchmark_shapes
from lightning_videoscale.cost import Measurement, MemoryModel, ShapeMatrix, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.cost.launch_bound import above_floor
from lightning_videoscale.cost.step_time import PowerLaw
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ClipShape, standard_mix

SAMPLES = 20_000
WIDE = np.round(np.arange(0.5, 3.0 + 1e-9, 0.01), 2)
"""Values of p beyond those that the paper, and `StepTimeModel`, search."""
TINY_SHAPES = [ClipShape(f, h, h, True) for f, h in ((1, 8), (1, 16), (3, 16), (5, 24), (5, 32), (9, 32), (9, 48))]


def shapes_of_mix(file: Path) -> list[ClipShape]:
    """Latents of all shapes that the standard mix has."""
    mix = standard_mix(Clips.from_csv(file), SAMPLES)
    return [latents_of(shape) for shape in SampleTable.of_clips(mix, STANDARD_POLICY, GEOMETRIES["wan2.1"]).shapes]


def measure(shapes: list[ClipShape], max_shapes: int, seconds: float, tiny: bool, file: Path) -> ShapeMatrix:
    trainer, module = trainer_with(1, tiny, max_steps=1), RectifiedFlow(TINY_WAN if tiny else WAN_1_3B)
    lengths = [GEOMETRIES["wan2.1"].sequence_length(f, h, w, latents=True) for f, h, w, _ in shapes]
    return benchmark_shapes(
        trainer, module, shapes, max_shapes=max_shapes, max_tokens=max(lengths), seconds=seconds, file=file
    )


def split(measurements: list[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Every second sequence length is held out, but neither the shortest nor the longest: nothing is extrapolated."""
    out = set(sorted({m.sequence_length for m in measurements})[1:-1:2])
    kept = [m for m in measurements if m.sequence_length not in out]
    return kept, [m for m in measurements if m.sequence_length in out]


def columns(measurements: list[Measurement]) -> tuple[Any, Any, Any]:
    b, s, seconds = (np.array(column, np.float64) for column in zip(*(m[:3] for m in measurements), strict=True))
    return b, s, seconds


def summary(model: StepTimeModel, measurements: list[Measurement], held_out: list[Measurement]) -> dict[str, Any]:
    b, s, seconds = columns(measurements)
    p = model.power_law.p
    found: dict[str, Any] = {
        "p": p,
        "power_law": vars(model.power_law),
        "additive": vars(model.additive),
        "floor": model.floor,
        "chosen": "additive" if model.form is model.additive else "power law",
        "correlation_with_b_s_p": float(np.corrcoef(b * s**p, seconds)[0, 1]),
        "correlation_with_tokens": float(np.corrcoef(b * s, seconds)[0, 1]),
    }
    b, s, seconds = columns(held_out)
    for name, form in (("chosen", model), ("power_law", model.power_law), ("additive", model.additive)):
        errors = np.abs(form.predict(b, s) / seconds - 1)
        found |= {f"{name}_median_error": float(np.median(errors)), f"{name}_worst_error": float(errors.max())}
    return found


def wide_power_law(fitted_to: list[Measurement], every: list[Measurement], out: list[Measurement]) -> dict[str, Any]:
    """The power law where p may be any of `WIDE`: fitted as the model's is, its errors on what was held out."""
    b, s, seconds = columns(fitted_to)
    above = above_floor(s, seconds)
    law = PowerLaw.fit(b[above], s[above], seconds[above], WIDE)
    b, s, seconds = columns(every)
    correlation = float(np.corrcoef(b * s**law.p, seconds)[0, 1])
    b, s, seconds = columns(out)
    errors = np.abs(law.predict(b, s) / seconds - 1)
    return {
        "searched": [float(WIDE[0]), float(WIDE[-1])],
        **vars(law),
        "correlation_with_b_s_p": correlation,
        "median_error": float(np.median(errors)),
        "worst_error": float(errors.max()),
    }


def fitted(cells: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is found of the cells of a matrix, and the cells with what is predicted of each."""
    measured = [
        Measurement(cell["samples"], cell["sequence_length"], cell["seconds"], cell["peak_bytes"])
        for cell in cells
        if cell["seconds"] is not None
    ]
    fitted_to, held_out = split(measured)
    model = StepTimeModel.fit(fitted_to)
    found = summary(model, measured, held_out)
    found["wide_power_law"] = wide_power_law(fitted_to, measured, held_out)
    if any(m.peak_bytes for m in measured):
        found["memory"] = vars(MemoryModel.fit(measured))
    rows = rows_of(model, cells, held_out)
    found["worst_error_of_all_cells"] = max(abs(row["error"]) for row in rows if row["seconds"] is not None)
    return found, rows


def rows_of(model: StepTimeModel, cells: list[dict[str, Any]], held_out: list[Measurement]) -> list[dict[str, Any]]:
    """Every cell of the matrix, with what is predicted of it."""
    out = {(m.samples, m.sequence_length) for m in held_out}
    rows = []
    for row in cells:
        cell = row | {"held_out": (row["samples"], row["sequence_length"]) in out}
        if row["seconds"] is not None:
            cell["predicted_seconds"] = float(model.predict(row["samples"], row["sequence_length"]))
            cell["error"] = cell["predicted_seconds"] / row["seconds"] - 1
        rows.append(cell)
    return rows


def refit(file: Path) -> None:
    """Fits the rows of a result anew; what was measured, where and when, stays as it is."""
    result = json.loads(file.read_text())
    found, result["rows"] = fitted(result["rows"])
    result["settings"] |= found
    file.write_text(json.dumps(result, indent=1) + "\n")
    show(result["rows"], result["settings"])


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--shapes", type=Path, help="table of clips; needed but for --tiny")
    parser.add_argument("--max-shapes", type=int, default=8, help="sequence lengths")
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell, beside its first run")
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU: nothing to publish")
    parser.add_argument("--matrix", type=Path, help="where to write the matrix; left out, beside the result")
    parser.add_argument("--refit", type=Path, metavar="RESULT", help="fit what this file holds, and write it again")
    options = parser.parse_args()
    if options.refit is not None:
        refit(options.refit)
        return
    commit = options.commit or provenance.commit()
    shapes = TINY_SHAPES if options.tiny else shapes_of_mix(options.shapes)
    output = options.output or provenance.path("cost", "step_time_fit")
    file = options.matrix or output.with_name(f"{output.stem}_matrix.json")
    matrix = measure(shapes, options.max_shapes, options.seconds, options.tiny, file)

    found, rows = fitted([vars(row) for row in matrix.rows])
    settings = {
        "dry_run": options.tiny,
        "model": TINY_WAN if options.tiny else WAN_1_3B,
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "mix": {"samples": SAMPLES, "seed": 0, "table": None if options.tiny else provenance.table(options.shapes)},
        "seconds_per_shape": options.seconds,
        "provenance": dict(matrix.provenance),
        **found,
    }
    show(rows, settings)
    provenance.write(output, "cost/step_time_fit", commit, settings, rows)
    print(f"written to {output}")


def show(rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    print(f"{'S':>7} {'B':>4} {'seconds':>9} {'spread':>7} {'predicted':>9} {'error':>7}  peak GiB")
    for row in rows:
        if row["seconds"] is None:
            print(f"{row['sequence_length']:>7} {row['samples']:>4} {row['outcome']}")
            continue
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "-"
        print(
            f"{row['sequence_length']:>7} {row['samples']:>4} {row['seconds']:>9.4f} {row['spread']:>7.1%} "
            f"{row['predicted_seconds']:>9.4f} {row['error']:>+7.1%}  {peak}{'  held out' * row['held_out']}"
        )
    for name in ("p", "floor", "chosen", "power_law", "wide_power_law", "additive"):
        print(f"{name}: {settings[name]}")
    for name, value in settings.items():
        if name.endswith("_error") or name.startswith("correlation"):
            print(f"{name}: {value:.4f}")


if __name__ == "__main__":
    main()
