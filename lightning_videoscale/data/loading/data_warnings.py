"""What the user is told, once, about shards that hold more, less or larger things than is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.epoch_plan import EpochPlan
from lightning_videoscale.data.planning.sample_weights import relative_weights, weights_and_samples
from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.planning.windows import EpochWindows
from lightning_videoscale.data.shards.captions import CAPTION_KEYS
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.keys import batch_name
from lightning_videoscale.families import said_of

_UNEVEN = 4.0  # times that the weight of one sample is another's


def warn_of_geometry(geometry: ModelGeometry, trainer: pl.Trainer | None) -> None:
    """Says that tokens are counted as another family than that of the trained network makes them."""
    classes = [] if trainer is None else [type(module) for module in trainer.lightning_module.modules()]
    own = said_of(classes, "GEOMETRIES")
    counted_as = [name for name, known in GEOMETRIES.items() if known == geometry]
    if own and counted_as and geometry not in own.values():
        network = next(cls for cls in classes if said_of([cls], "GEOMETRIES"))
        rank_zero_warn(
            f"VideoDataModule counts tokens as of geometry={counted_as[0]!r}, and {network.__name__} makes others of a "
            f"clip: costs and budgets are wrong. Give VideoDataModule(geometry=...) one of {sorted(own)}, or a "
            "ModelGeometry."
        )


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
            "that a sample is about, and beside it npy, safetensors, json, txt, and images that have a name. Pickles "
            "(.pth, .pt, .pkl) never are, since loading them runs code."
        )


def check_caption_key(index: ShardIndex, caption_key: str | None) -> None:
    """Raises ShardError if captions were asked for by the name of a field that no sample has."""
    if caption_key is not None and not any(caption_key in shard.caption_fields for shard in index.shards):
        raise ShardError(
            f"caption_key={caption_key!r}, but no sample has a text under that name in its .json. Name another field, "
            f"or none: then captions are .txt, or else one of the fields {', '.join(CAPTION_KEYS)}."
        )


def warn_of_captions(index: ShardIndex) -> None:
    """Says how many samples have no caption."""
    if without := sum(index.without_caption):
        # Without texts and fields altogether, a model without captions is meant.
        is_meant = without == len(index) and "json" not in index.samples.extensions
        say = rank_zero_info if is_meant else rank_zero_warn
        say(
            f"{without} of {len(index)} samples have no caption and are read with an empty text; the first is "
            f"{index.sample_id(index.first_without_caption)!r}. Captions are .txt, or else a field of .json "
            f"({', '.join(CAPTION_KEYS)}; caption_key= names another)."
        )


def explain_missing(error: BaseException, indexes: Sequence[ShardIndex]) -> None:
    """Adds to a KeyError where a member of batches comes from that the shards do not hold."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if name == "latents" and any((index.samples.clips.media != Media.LATENTS).any() for index in indexes):
        error.add_note(
            "The shards hold videos or images, of which batches have 'video'. For 'latents', encode them once by "
            "`videoscale encode --vae ...` and train on its output, or while training by "
            "VideoDataModule(encode=OnlineEncoder(DiffusersVae(...)))."
        )
    held = {batch_name(extension) for index in indexes for extension in index.samples.extensions}
    if name in ("text_embeds", "text_mask") and name not in held:
        error.add_note(
            f"The shards hold no {name}, and batches have captions as texts. Embeddings come by "
            "`videoscale encode --text-encoder ...`, or while training by "
            "VideoDataModule(encode=OnlineEncoder(..., TransformersText(...)))."
        )


def warn_of_missing_embeds(index: ShardIndex) -> None:
    """Says how many samples lack the embeddings of their caption, where others have them."""
    names = {extension for extension in index.samples.extensions if batch_name(extension) == "text_embeds"}
    if not names:
        return
    without, first = 0, 0
    for number, shard in enumerate(index.shards):
        lacking = np.flatnonzero(~shard.samples.with_member(names))
        if len(lacking) and not without:
            first = index.first_sample(number) + int(lacking[0])
        without += len(lacking)
    if without:
        rank_zero_warn(
            f"{without} of {len(index)} samples have no text_embeds, which the others have; the first is "
            f"{index.sample_id(first)!r}. In a batch of both they are a list, with None for these, and no tensor. "
            "`videoscale encode --text-encoder` writes them for all samples."
        )


def warn_of_shapeless(index: ShardIndex, table: SampleTable, windows: EpochWindows | None) -> None:
    """Names samples of a table, or of all windows, that are too small to be trained on.

    Raises:
        ValueError: If all of them are.
    """
    shapeless, first = _shapeless(table, windows)
    if shapeless:
        sample = index.samples[first]
        left_out = (
            f"{shapeless} samples are left out, because they are smaller than one patch of the model: "
            f"the first is {index.sample_id(first)!r} of {sample.width}x{sample.height} pixels."
        )
        if shapeless == len(index):
            raise ValueError(f"No samples are left: all {left_out}")
        rank_zero_warn(left_out)


def warn_of_oversized(table: SampleTable, budget: Budget) -> None:
    """Names shapes of which one sample is more than the memory budget."""
    if said := oversized_shapes(table, budget):
        rank_zero_warn(said)


def oversized_shapes(table: SampleTable, budget: Budget) -> str:
    """Returns which shapes are, of which one sample is more than the memory budget; empty if none."""
    counts = np.bincount(table.shape_id[table.shape_id >= 0], minlength=len(table.shapes)).tolist()
    lengths = table.sequence_lengths.tolist()
    rows = zip(table.shapes, lengths, counts, strict=True)
    if not (oversized := [row for row in rows if budget.exceeds_memory(row[1])]):
        return ""
    listed = ", ".join(f"{shape[:3]}: {length} tokens, {count} samples" for shape, length, count in oversized[:20])
    beside = f", of which each takes {budget.overhead_tokens:g} beside its own," if budget.overhead_tokens else ""
    return (
        f"One sample alone exceeds the memory budget m_mem={budget.m_mem} tokens{beside} in {len(oversized)} buckets "
        f"({listed}{', …' * (len(oversized) > 20)}); they train with batch size 1. Raise m_mem if they fit, or "
        "leave such clips out."
    )


def say_uneven(plan: EpochPlan) -> None:
    """Tells where samples of some shapes count for much more in an epoch than others; `BucketPlanner` says why."""
    if not plan.steps:
        return
    weights = relative_weights(*weights_and_samples(plan))
    least, most = int(np.nanargmin(weights)), int(np.nanargmax(weights))
    if weights[most] > _UNEVEN * weights[least]:
        rank_zero_info(
            "Within a step all samples count alike, but steps hold different numbers of them. Over the epoch a sample "
            f"of {plan.table.shapes[most][:3]} counts {weights[most]:.2g} times as much as the mean of all, and one of "
            f"{plan.table.shapes[least][:3]} {weights[least]:.2g} times. With loss_normalization='epoch' all count "
            "alike; more micro-batches a step (accumulate_grad_batches) bring them nearer."
        )


def say_passes(epoch: int, passes: Mapping[str, float]) -> None:
    """Tells how often each of several datasets has been walked through."""
    walked = ", ".join(f"{name} {times:.2f} times" for name, times in passes.items())
    rank_zero_info(f"Epoch {epoch} begins; of each dataset was drawn before: {walked}.")


def _shapeless(table: SampleTable, windows: EpochWindows | None) -> tuple[int, int]:
    """How many there are, and the first."""
    if windows is not None:
        return windows.unusable, windows.first_unusable if windows.unusable else 0
    shapeless = np.flatnonzero(table.shape_id < 0)
    return len(shapeless), int(shapeless[0]) if len(shapeless) else 0
