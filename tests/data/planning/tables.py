"""Samples for plans: random tables, and the mix on which balances are compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ClipShape, Media, standard_mix

SHAPES = [ClipShape(f, h, w, latents=True) for f, h, w in ((1, 4, 4), (1, 8, 8), (3, 8, 8), (5, 8, 8), (9, 16, 16))]
LENGTHS = np.array([f * h * w // 4 for f, h, w, _ in SHAPES])

WAN_14B = StepTimeModel.analytic(TRANSFORMERS["wan2.1-14b"])
LONGEST = 75_600
"""Tokens of 81 frames of 720 x 1280."""
BUDGET = BucketBudget(2 * LONGEST, LONGEST**WAN_14B.power_law.p, WAN_14B.power_law.p)


def table_of(shape_ids: list[int], shards: int = 1) -> SampleTable:
    shard = (np.arange(len(shape_ids)) * shards // max(len(shape_ids), 1)).astype(np.int32)
    return SampleTable.create(SHAPES, LENGTHS, np.array(shape_ids, np.int32), shard=shard)


def footage() -> Clips:
    """Sizes, rates and lengths such as user-generated video has: mostly one of three sizes, a tail of odd ones."""
    draw = np.random.default_rng(0)
    sizes = [
        (320, 240),
        (960, 540),
        (1280, 720),
        (404, 720),
        (1920, 1080),
        (640, 480),
        (480, 272),
        (352, 640),
        (800, 450),
    ]
    size = np.array(sizes)[draw.choice(9, 3000, p=[0.333, 0.333, 0.18, 0.07, 0.06, 0.01, 0.006, 0.005, 0.003])]
    rate = draw.choice([24.0, 25.0, 29.97], 3000)
    frames = np.where(size[:, 0] == 320, draw.integers(60, 310, 3000), draw.integers(180, 250, 3000))
    return Clips(
        width=size[:, 0].astype(np.int32),
        height=size[:, 1].astype(np.int32),
        num_frames=frames.astype(np.int32),
        fps=rate,
        duration=frames / rate,
        media=np.full(3000, Media.VIDEO, np.uint8),
        caption_length=np.zeros(3000, np.int32),
        source=np.where(size[:, 0] == 320, 0, np.where(size[:, 0] == 960, 1, 2)).astype(np.int32),
    )


def mixed(samples: int, seed: int = 0) -> SampleTable:
    """The standard mix of such footage, for Wan, in one dataset."""
    clips = standard_mix(footage(), samples, seed)
    clips = replace(clips, source=np.zeros_like(clips.source))
    return SampleTable.of_clips(clips, STANDARD_POLICY, GEOMETRIES["wan2.1"], seed)
