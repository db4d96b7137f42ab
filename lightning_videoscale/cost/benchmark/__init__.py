"""What training steps of some shapes take, measured under the strategy that will train them.

This part of `cost/` knows Lightning; the rest does not, and none of it imports this.

- `grid`: `Cell`, which batch sizes of which shapes are worth measuring.
- `measure_shapes`: the loop over the grid; out of memory is a result like any other.
- `growing_matrix`: its rows so far, on disk too.
- `known_matrix`: which matrix holds for a training.
- Adapters to a Trainer: `trainer_steps` (training steps after which nothing is trained), `ranks` (what its ranks tell
  each other) and `within_fit` (all that `fit` sets up, and a benchmark in the place of the training).

What makes batches is handed in: `data/loading/benchmark_shapes.py` has the public function.
"""
