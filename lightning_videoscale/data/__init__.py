"""From tar shards to balanced batches.

The road of a sample, one file each: `shards` (which tars, and what is in them), `index` (a table of all samples),
`plan` (which samples meet in which micro-batch, on which data-parallel rank, in which step), `reader` and `decoding`
(bytes to tensors), `batch` (what the training step receives), `loader` (a pass over the plan) and `datamodule` (all of
it behind a LightningDataModule).
"""

from lightning_videoscale.data.batch import Batch, BatchMeta
from lightning_videoscale.data.datamodule import VideoDataModule
from lightning_videoscale.data.index import ShardIndex
from lightning_videoscale.data.plan import BucketPlanner, EpochPlan, MicroBatch
from lightning_videoscale.data.shards import ShardError

__all__ = [
    "Batch",
    "BatchMeta",
    "BucketPlanner",
    "EpochPlan",
    "MicroBatch",
    "ShardError",
    "ShardIndex",
    "VideoDataModule",
]
