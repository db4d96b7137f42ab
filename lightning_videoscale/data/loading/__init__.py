"""From a plan to the batches that a training step receives.

- `reader` reads the samples of a planned micro-batch, in `parts` by several workers; `batch` puts them together, and
  `texts` those that are of different lengths.
- `loader`: a pass over the plan of an epoch; `progress`: where a run stands in it. Where epochs are planned in windows,
  the next is made in the `background`, and `window_follower` tells the Trainer of it. `without_trainer` is for loaders
  that were made without one.
- `datamodule`: `VideoDataModule`, all of it. Behind it: `indexed_shards` (its shards), `run_budget` (the budget
  and costs that count now), `data_warnings` (what the user is told) and `consistency` (ranks and runs that must agree).
- `trainer`: all that the data ask of a Trainer and change in it; `loss_weighting`: the callback that it may add.
- `benchmark_shapes` and `synthetic_batches`: what training steps of the data's shapes take.
"""
