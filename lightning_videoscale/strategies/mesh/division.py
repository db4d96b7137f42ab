"""What the division of a strategy's mesh is chosen by: the run's data, and what stands against rings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_videoscale.compat.torch.versions import ring_attention_is_traced
from lightning_videoscale.parallel import SequenceMesh, SplitPlan, find_plan
from lightning_videoscale.strategies.network_changes import split_plans
from lightning_videoscale.strategies.settings import SequenceParallelSettings


@runtime_checkable
class KnowsClips(Protocol):
    """What a DataModule may offer, as `VideoDataModule` does, from its ``setup`` on."""

    def clip_lengths(self) -> Mapping[int, int]:
        """How many clips there are to train on, by their tokens; empty if nobody knows."""

    def tokens_per_device(self) -> float | None:
        """How many tokens a device holds in training; None if nobody knows."""


def clips_of(trainer: pl.Trainer) -> Mapping[int, int] | None:
    """Returns how many clips of how many tokens a Trainer's data have; None where they do not say."""
    data: Any = getattr(trainer, "datamodule", None)
    return (data.clip_lengths() or None) if isinstance(data, KnowsClips) else None


def networks_to_split(
    module: nn.Module, mesh: SequenceMesh, settings: SequenceParallelSettings
) -> list[tuple[nn.Module, SplitPlan]]:
    """Returns the networks that the settings name or leave to be found, with their plans; those without are left out.

    Raises:
        ValueError: As `split_plans` does.
    """
    planned = [(module.get_submodule(path), plan) for path, plan in split_plans(module, mesh, settings).items()]
    found = [(network, plan if plan is not None else find_plan(network)) for network, plan in planned]
    return [(network, plan) for network, plan in found if plan is not None]


def objection_to_rings(settings: SequenceParallelSettings) -> str | None:
    """Returns why no ring may be chosen, or None. One that is named runs all the same."""
    if settings.compile and not ring_attention_is_traced():
        return "this torch compiles no ring without breaking the graph of a block"
    return None


def size_of_group(trainer: pl.Trainer, devices_per_node: int) -> int:
    """Returns how many ranks share a sequence under ``sp_size="auto"``; collective over all ranks.

    It is the smallest divisor of a node's devices on which the longest clip fits; all of them where it fits on none.
    The log says so, and what that makes of the global batch.

    Args:
        trainer: Whose data tell the clips, and how many tokens a device holds.
        devices_per_node: Devices of a node.

    Raises:
        ValueError: On every rank, if the data of rank 0 do not tell.
    """
    found: tuple[int, str] | ValueError | None = None
    if trainer.is_global_zero:  # a measured matrix may lie on its node only
        try:
            found = _size_of_group(trainer, devices_per_node)
        except ValueError as error:
            found = error
    found = trainer.strategy.broadcast(found)
    if isinstance(found, ValueError):
        raise found
    assert found is not None
    size, why = found
    rank_zero_info(why)
    return size


def _size_of_group(trainer: pl.Trainer, devices_per_node: int) -> tuple[int, str]:
    """As `size_of_group`, by what this rank knows, with the line for the log."""
    data: Any = getattr(trainer, "datamodule", None)
    clips = clips_of(trainer)
    capacity = data.tokens_per_device() if isinstance(data, KnowsClips) else None
    if clips is None or capacity is None:
        raise ValueError(
            "sp_size='auto' needs the longest clip and how many tokens a device holds, and the data do not tell "
            f"{'clips' if clips is None else 'that'}. Use VideoDataModule with budget=BucketBudget(m_mem=...) for one "
            "device, or run `videoscale benchmark-shapes` beforehand; or give sp_size a number."
        )
    longest = max(clips)
    sizes = [size for size in range(1, devices_per_node + 1) if devices_per_node % size == 0]
    size = next((size for size in sizes if size * capacity >= longest), devices_per_node)
    groups = trainer.world_size // size
    micro_batches = trainer.accumulate_grad_batches
    fits = "" if size * capacity >= longest else ", which is too little for it"
    return size, (
        f"sp_size='auto': the longest clip has {longest} tokens and a device holds {capacity:.0f}, so {size} of "
        f"{devices_per_node} devices of a node share a sequence{fits}. The global batch is {groups * micro_batches} "
        f"micro-batches a step: {groups} data-parallel ranks times {micro_batches}."
    )
