"""All ranks plan alike, and a run goes on with the shards that its epoch was begun with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.location import short_names


def check_same_plan(trainer: pl.Trainer, digest: str) -> None:
    """Raises ValueError on every rank if any has another plan than rank 0."""
    same = trainer.strategy.broadcast(digest) == digest
    if not trainer.strategy.reduce_boolean_decision(same, all=True):
        raise ValueError(
            f"The ranks do not see the same shards: rank {trainer.global_rank} planned {digest[:12]}, which "
            f"{'equals' if same else 'differs from'} rank 0's plan. Compare the shards on all nodes."
        )


def contents_of(index: ShardIndex) -> dict[str, str]:
    """What each shard of an index holds, as a hash under the shard's short name."""
    names = short_names([shard.url for shard in index.shards])
    return {name: shard.facts.contents for name, shard in zip(names, index.shards, strict=True)}


def digest_of(contents: Mapping[str, str]) -> str:
    """One hash of what all shards hold."""
    return hashlib.sha256(json.dumps(contents).encode("utf-8", "surrogatepass")).hexdigest()


def check_same_index(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises ValueError, naming the difference, if the shards are not those that an epoch was begun with."""
    if list(before.items()) == list(now.items()):  # in one order: samples are drawn by their numbers
        return
    kinds = {
        "gone": sorted(before.keys() - now.keys()),
        "new": sorted(now.keys() - before.keys()),
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    }
    listed = "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    )
    raise ValueError(
        f"The epoch was begun with other shards ({listed or 'in another order'}): which of their samples are done "
        "with cannot be told any more. Bring the shards back (in the same order: a pattern is sorted, the result of "
        "glob.glob is not), or start a new run from the weights."
    )


def drawn_by(settings: Mapping[str, Any], weights: Mapping[str, float] | None) -> dict[str, Any]:
    """What the order of an epoch's samples depends on, of a DataModule's arguments, beside its shards.

    Weights in Python's own numbers: a checkpoint that holds numpy's is not loaded by default.
    """
    order = {name: settings[name] for name in ("seed", "shard_window")}
    return order | {"weights": None if weights is None else list(map(float, weights.values()))}


def check_same_draws(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if samples are not drawn in the order that an epoch was begun with.

    Args:
        before: The arguments of the DataModule that order depends on, as a checkpoint has them.
        now: Likewise, as they were given.
    """
    changed = [f"{name}={before[name]!r}, now {now[name]!r}" for name in before if before[name] != now.get(name)]
    if changed:
        raise ValueError(
            f"The epoch was begun with {'; '.join(changed)}: which of its samples are done with cannot be told any "
            "more. Give what it was begun with, and another value from the next epoch on; or start a new run from the "
            "weights."
        )
