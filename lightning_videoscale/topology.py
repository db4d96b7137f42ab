"""Who am I among the data-parallel ranks, and when do they wait for each other? What `data/` and `callbacks/` ask.

Sequence-parallel strategies answer it themselves (they implement `DataParallelTopology`): all ranks of one
sequence-parallel group share one data-parallel rank, hence one batch. Under any other strategy every process is a
data-parallel rank of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed import ProcessGroup

from lightning_videoscale.parallel.mesh import host_group


@runtime_checkable
class DataParallelTopology(Protocol):
    """What a strategy must offer for the data and the callbacks to know their place."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's batch stream, in ``[0, data_parallel_size)``."""

    @property
    def data_parallel_size(self) -> int:
        """Number of distinct batch streams."""

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks that work on one batch together."""

    @property
    def applies_loss_weight(self) -> bool:
        """Whether the strategy multiplies the loss by the batch's ``meta.loss_weight`` in its backward."""

    def host_group(self, timeout: timedelta) -> AbstractContextManager[ProcessGroup]:
        """A gloo group of all ranks that nothing else uses, closed on leaving; collective over all ranks to enter."""


class PlainTopology:
    """The topology of a strategy that knows nothing of sequence parallelism: one batch stream per process."""

    sequence_parallel_size = 1
    applies_loss_weight = False

    def __init__(self, strategy: Strategy) -> None:
        self.data_parallel_rank = strategy.global_rank if hasattr(strategy, "global_rank") else 0
        self.data_parallel_size = getattr(strategy, "world_size", 1)

    def host_group(self, timeout: timedelta) -> AbstractContextManager[ProcessGroup]:
        """See `DataParallelTopology`."""
        return host_group(timeout)


@runtime_checkable
class ExpectsShapes(Protocol):
    """What a strategy may offer: it is told how often shapes come, where that decides what is worth preparing."""

    def expect_shapes(self, micro_batches_per_shape: float) -> None:
        """Says how many micro-batches of a shape each rank trains in the run, on average over its shapes.

        Called on all ranks with the same number, before the first step or between two steps.
        """


@runtime_checkable
class RunsByGraphs(Protocol):
    """What a strategy may offer whose networks may run by CUDA graphs: whoever measures steps must know."""

    @property
    def graph_mode(self) -> bool | Literal["auto"]:
        """False where none do."""

    @property
    def steps_until_graphs(self) -> int:
        """How many steps of a shape run otherwise before one is captured; 0 where none is."""

    def describe_graphs(self) -> dict[str, int]:
        """Calls of networks so far: ``"replayed"``, ``"eager"``, ``"busy"``, ``"captured"``; and ``"bytes"`` of memory.

        Empty where no network runs by graphs.
        """


def topology_of(trainer: pl.Trainer) -> DataParallelTopology:
    """Returns the strategy itself where it knows its data-parallel place, else one stream per process.

    Raises:
        TypeError: If the strategy offers a part of `DataParallelTopology` only.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DataParallelTopology):
        return strategy
    if hasattr(strategy, "data_parallel_rank"):
        names = [name for name in vars(DataParallelTopology) if not name.startswith("_")]
        raise TypeError(
            f"{type(strategy).__name__} has data_parallel_rank, but lacks "
            f"{[name for name in names if not hasattr(strategy, name)]} of DataParallelTopology."
        )
    return PlainTopology(strategy)


def waits_in_every_micro_batch(trainer: pl.Trainer) -> bool:
    """Whether ranks wait for each other in every micro-batch, as under FSDP, ZeRO-2 and 3, not only once a step."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        config = strategy.config if isinstance(strategy.config, dict) else {}
        return int((config.get("zero_optimization") or {}).get("stage", 0)) >= 2
    return isinstance(strategy, (FSDPStrategy, ModelParallelStrategy))
