"""From tar shards to balanced batches.

The road of a sample: `patterns` (which tars), `shards`, `storage` and `remote` (bytes of them), `tars`, `keys`,
`captions` and `describing` (what is in them), `indexing`, `samples` and `index` (a table of all samples), `shapes` and
`geometry` (what the model sees of each),
`planning/` (which samples meet in which micro-batch, on which data-parallel rank, in which step), `reader`, `decoding`,
`media` and `frames` (bytes to tensors), `batch` (what the training step receives), `loader` (a pass over the plan),
`progress` (where a run stands in it) and `datamodule` (all of it behind a LightningDataModule, with `indexed_shards`,
`budgets`, `agreement` and `replanning` behind that). Beside it, `benchmark/` and `auto_budget` measure what a
micro-batch may hold, `vae` and `encoding` make shards of latents of shards of videos; `online`, with `vae` and `text`,
encodes while training; `loss_weighting` applies the weights of batches.
"""

from lightning_videoscale.data.auto_budget import AutoBudget
from lightning_videoscale.data.encoding.online_encoder import BatchEncoder, OnlineEncoder
from lightning_videoscale.data.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.loading.batch import Batch, BatchMeta
from lightning_videoscale.data.loading.datamodule import VideoDataModule
from lightning_videoscale.data.planning import BucketPlanner, EpochPlan, MicroBatch, SampleTable
from lightning_videoscale.data.planning.shapes import Clips, ClipShape, ShapePolicy
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex

__all__ = [
    "GEOMETRIES",
    "AutoBudget",
    "Batch",
    "BatchEncoder",
    "BatchMeta",
    "BucketPlanner",
    "ClipShape",
    "Clips",
    "EpochPlan",
    "MicroBatch",
    "ModelGeometry",
    "OnlineEncoder",
    "SampleTable",
    "ShapePolicy",
    "ShardError",
    "ShardIndex",
    "VideoDataModule",
]
