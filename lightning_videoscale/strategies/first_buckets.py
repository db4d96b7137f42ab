"""The memory of DDP's first buckets, which the second step must not find taken."""

from __future__ import annotations

import time

import torch

_PAUSE = 0.4
"""Seconds in which NCCL's thread looks several times."""


def await_release(device: torch.device) -> None:
    """Waits until nobody holds the first buckets any more but DDP, which makes others in the second step.

    NCCL holds what was exchanged until its own thread has seen that the device is done, and some other collective comes
    after that. DDP's new buckets begin with one. Where the host is there before that thread, the next one comes at the
    end of backward: until then the first buckets lie beside the new ones and all activations, as much again as all
    gradients. M_mem leaves no room for that, and the run ends. Seen with torch 2.11 on an H200.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(_PAUSE)
