"""The model of one's own in the examples."""

from __future__ import annotations

from typing import Any

import torch

from examples.joint_dit import JointDiT
from tests.distributed.families.harness import Family


def build(**_: Any) -> JointDiT:
    return JointDiT(width=32, layers=2)


def inputs(batch: int = 2, text: int = 7, frames: int = 3, side: int = 3, **_: Any) -> dict[str, Any]:
    mask = torch.ones(batch, text, dtype=torch.bool)
    mask[0, text // 2 + 1 :] = False
    return {
        "latents": torch.randn(batch, 4, frames, side, side),
        "time": torch.rand(batch),
        "text": torch.randn(batch, text, 16),
        "text_mask": mask,
    }


FAMILIES = {"own_model": Family(build, inputs)}
