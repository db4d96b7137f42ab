"""What the user is told, once, about shards that hold more, less or larger things than is trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.index import ShardIndex
from lightning_videoscale.data.planning import SampleTable


def warn_of_refused(index: ShardIndex) -> None:
    """Names members that the index refused."""
    if index.refused:
        shown = "; ".join(f"{shard}: {member!r}: {reason}" for shard, (member, reason) in index.refused[:3])
        rank_zero_warn(
            f"{len(index.refused)} members of the shards are left out ({shown}{'; …' * (len(index.refused) > 3)}). "
            "`videoscale index` lists all of them."
        )


def warn_of_ignored(index: ShardIndex) -> None:
    """Names formats that are not read."""
    if ignored := sorted({extension for shard in index.shards for extension in shard.ignored}):
        rank_zero_warn(
            f"The shards hold members that are left alone: {ignored}. Read are the one video, image or latents "
            "that a sample is about, and beside it npy, safetensors, json, txt, and images that have a name."
        )


def warn_of_shapeless(index: ShardIndex, table: SampleTable) -> None:
    """Names samples that are too small to be trained on.

    Raises:
        ValueError: If all of them are.
    """
    if len(shapeless := np.flatnonzero(table.shape_id < 0)):
        clips, first = index.samples.clips, int(shapeless[0])
        left_out = (
            f"{len(shapeless)} samples are left out, because they are smaller than one patch of the model: "
            f"the first is {index.sample_id(first)!r} of {clips.width[first]}x{clips.height[first]} pixels."
        )
        if len(shapeless) == len(table):
            raise ValueError(f"No samples are left: all {left_out}")
        rank_zero_warn(left_out)


def warn_of_oversized(table: SampleTable, budget: BucketBudget) -> None:
    """Names shapes of which one sample is more than the memory budget."""
    counts = np.bincount(table.shape_id[table.shape_id >= 0], minlength=len(table.shapes)).tolist()
    lengths = table.sequence_lengths.tolist()
    rows = zip(table.shapes, lengths, counts, strict=True)
    if oversized := [row for row in rows if budget.exceeds_memory(row[1])]:
        listed = ", ".join(f"{shape[:3]}: {length} tokens, {count} samples" for shape, length, count in oversized[:20])
        rank_zero_warn(
            f"One sample alone exceeds the memory budget m_mem={budget.m_mem} tokens in {len(oversized)} buckets "
            f"({listed}{', …' * (len(oversized) > 20)}); they train with batch size 1. Raise m_mem if they fit, or "
            "leave such clips out."
        )


def say_passes(epoch: int, passes: Mapping[str, float]) -> None:
    """Tells how often each of several datasets has been walked through."""
    walked = ", ".join(f"{name} {times:.2f} times" for name, times in passes.items())
    rank_zero_info(f"Epoch {epoch} begins; of each dataset was drawn before: {walked}.")
