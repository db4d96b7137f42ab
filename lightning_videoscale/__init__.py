"""Train video diffusion transformers at scale with PyTorch Lightning.

Importing the package registers its strategies with Lightning (`Trainer(strategy="ulysses_ddp")`) and the models that
it knows how to split and to fuse.
"""

from lightning_videoscale import callbacks, cost, data, kernels, metrics, parallel, strategies
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.benchmark import benchmark_shapes
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    register_strategies,
)

__all__ = [
    "BucketBudget",
    "SequenceParallelDDPStrategy",
    "SequenceParallelDeepSpeedStrategy",
    "SequenceParallelFSDP2Strategy",
    "VideoDataModule",
    "benchmark_shapes",
    "callbacks",
    "cost",
    "data",
    "inject_fused_kernels",
    "kernels",
    "metrics",
    "parallel",
    "strategies",
]

register_strategies()
