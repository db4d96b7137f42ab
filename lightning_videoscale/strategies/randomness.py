"""Random numbers that agree inside a sequence-parallel group and differ between the groups."""

from __future__ import annotations

import random
import zlib

import numpy as np
import torch


def seed_generators(seed: int, *place: int | str) -> None:
    """Seeds the global generators of torch (all devices), NumPy and Python for one place in the run.

    Ranks that name the same place draw the same numbers afterwards, whatever any of them drew before; different
    places are independent streams. That is what keeps noise, timesteps and dropped captions equal on the ranks that
    share a batch, and makes a resumed run draw what an uninterrupted one would have drawn.

    Args:
        seed: The run's seed, any non-negative integer.
        place: Where the run is, such as the stage, the data-parallel rank, the epoch and the batch.
    """
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in place]
    torch_seed, python_seed, numpy_seed = np.random.SeedSequence([seed, *words]).generate_state(3, np.uint64).tolist()
    torch.manual_seed(torch_seed >> 1)  # torch takes signed 64-bit seeds
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)
