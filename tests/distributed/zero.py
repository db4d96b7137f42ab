"""Real DeepSpeed on CPUs, for tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch.nn.functional as F

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (`make install` installs it)"
)


@contextmanager
def deepspeed_on_cpu() -> Iterator[None]:
    """Lets a process use DeepSpeed, and leaves it as it was for tests without."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its reductions over shared memory are for inference; compiling them would take a minute where it is done first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with patch.object(F, "linear", F.linear):  # stage 3 replaces it for good
        yield
