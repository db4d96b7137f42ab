"""The plan of an epoch: a pure function of arrays, the same on every rank.

- `table`: `SampleTable`, what the planner knows of the samples.
- `stream`: in which order an epoch draws them.
- `batches`: which samples form a micro-batch.
- `arrange`: in which step, on which data-parallel rank a micro-batch is trained.
- `diversity`: how many different shapes a step has.
- `micro_batch`: `MicroBatch` and `BatchMeta`, what the plan says about one.
- `plan`: `BucketPlanner`, all of it together; `epoch_plan`: what it makes, `EpochPlan`.
- `windows`: an epoch that is not in memory as a whole; `lazy_stream`: the order of its draws.
- `figures`: how good a plan is.
- `compute_budget`: which M_comp makes the most of it.
- `shapes`: what of a clip is read, and how large; `seeded_random`: numbers that are the same on every machine.
"""

from lightning_videoscale.data.planning.epoch_plan import EpochPlan
from lightning_videoscale.data.planning.micro_batch import MicroBatch
from lightning_videoscale.data.planning.plan import Balance, BucketPlanner, LossNormalization, LossUnit
from lightning_videoscale.data.planning.table import SampleTable

__all__ = ["Balance", "BucketPlanner", "EpochPlan", "LossNormalization", "LossUnit", "MicroBatch", "SampleTable"]
