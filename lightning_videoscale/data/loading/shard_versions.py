"""How the shards are now, asked for once for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.indexing import Version, versions_of
from lightning_videoscale.data.shards.location import is_remote


def shared_versions(trainer: pl.Trainer | None, shards: Sequence[str]) -> list[Version]:
    """How each shard is now, as rank 0 sees it.

    Files may be copies on each node, written at other times. So one rank of each node compares those; if a node has
    others, every rank asks for itself.

    Args:
        trainer: Whose ranks they are; None: this process is the only one.
        shards: Paths and URLs.

    Raises:
        ShardError: On every rank, if rank 0 finds a shard missing, or its server unfit.
    """
    if trainer is None or trainer.world_size == 1:
        return versions_of(shards)
    asked = _asked(shards) if trainer.is_global_zero else []
    named, found = trainer.strategy.broadcast((list(shards), asked))
    if isinstance(found, ShardError):
        raise found
    same = named == list(shards) and (trainer.is_global_zero or trainer.local_rank > 0 or _same_files(shards, found))
    if trainer.strategy.reduce_boolean_decision(same, all=True):
        return found
    return versions_of(shards)


def _asked(shards: Sequence[str]) -> list[Version] | ShardError:
    try:
        return versions_of(shards)
    except ShardError as error:
        return error


def _same_files(shards: Sequence[str], versions: Sequence[Version]) -> bool:
    """Whether this node sees local shards as they are said to be."""
    files = [(url, version) for url, version in zip(shards, versions, strict=True) if not is_remote(url)]
    return _asked([url for url, _ in files]) == [version for _, version in files]
