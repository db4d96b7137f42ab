"""What training steps of the shapes in the data take, measured under the strategy that will train them.

- `grid`: `Cell`, which batch sizes of which shapes are worth measuring.
- `synthetic`: batches of a shape, as the DataModule would make them.
- `steps`: `RealSteps`, training steps of a Trainer that is set up, after which nothing is trained.
- `keeping`: `GrowingMatrix`, its rows so far, on disk too.
- `measuring`: `measure_shapes`, the loop over the grid; out of memory is a result like any other.
- `benchmark`: `benchmark_shapes`, all of it for a Trainer that has not begun.
"""

from lightning_videoscale.data.benchmark.benchmark import benchmark_shapes
from lightning_videoscale.data.benchmark.grid import Cell, spread_over_shapes
from lightning_videoscale.data.benchmark.measuring import measure_shapes
from lightning_videoscale.data.benchmark.synthetic import RandomBatches, RepresentativeBatches, SyntheticBatches

__all__ = [
    "Cell",
    "RandomBatches",
    "RepresentativeBatches",
    "SyntheticBatches",
    "benchmark_shapes",
    "measure_shapes",
    "spread_over_shapes",
]
