"""Random numbers that agree inside a sequence-parallel group and differ between the groups."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int, *place: int | str) -> None:
    """Seeds the global generators of torch (CPU and CUDA), NumPy and Python for one place in the run.

    Ranks that name the same place draw the same numbers afterwards, whatever any of them drew before; different
    places are independent streams. That is what keeps noise, timesteps and dropped captions equal on the ranks that
    share a batch, and makes a resumed run draw what an uninterrupted one would have drawn.
    """
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in place]
    torch_seed, python_seed, numpy_seed = np.random.SeedSequence([seed, *words]).generate_state(3, np.uint64).tolist()
    torch_seed >>= 1  # torch takes signed 64-bit seeds
    # Not torch.manual_seed: for every kind of accelerator that is not in use it writes down the stack, for a later
    # error message, which takes the host longer than all the rest of a step's bookkeeping.
    torch.default_generator.manual_seed(torch_seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of the global generators of torch (CPU and ``device``), NumPy and Python, as plain data."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Sets the global generators to what `generator_states` returned; CUDA's only where both have one."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
