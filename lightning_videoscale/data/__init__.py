"""From tar shards to balanced batches.

- `planning/`: which samples form which micro-batch, on which data-parallel rank, in which step. Pure.
- `shards/`: where the samples lie, what they are, and how their bytes become tensors.
- `packing/`: a folder of videos and captions into shards.
- `encoding/`: pixels to latents and captions to embeddings, beforehand or while training.
- `loading/`: what the training step receives, and all of it behind `VideoDataModule`.

Each of these imports those above it, never one below. What a micro-batch may hold is decided in
`cost/`.
"""

from lightning_videoscale.cost.auto_budget import AutoBudget
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.encoding.online_encoder import BatchEncoder, OnlineEncoder
from lightning_videoscale.data.loading.benchmark_shapes import benchmark_shapes
from lightning_videoscale.data.loading.datamodule import VideoDataModule
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning import BucketPlanner, EpochPlan, MicroBatch, SampleTable
from lightning_videoscale.data.planning.micro_batch import Batch, BatchMeta
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
    "RandomBatches",
    "SampleTable",
    "ShapePolicy",
    "ShardError",
    "ShardIndex",
    "VideoDataModule",
    "benchmark_shapes",
]
