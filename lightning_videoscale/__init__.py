"""Train video diffusion transformers at scale with PyTorch Lightning.

Importing the package registers its strategies with Lightning (`Trainer(strategy="ulysses_ddp")`).
"""

import lightning_videoscale.injection.wan  # noqa: F401  registers Wan's split plan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, register_strategies

__all__ = ["SequenceParallelDDPStrategy"]

register_strategies()
