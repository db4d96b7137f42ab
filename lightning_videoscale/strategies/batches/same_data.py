"""Do the ranks of a group read the same data? A loader of a user's own may give each rank another part of them.

One rank of a group reads a batch for all. Of a loader that shards itself by the global rank, the group would train one
rank's shard or alternate between those of several, and never see the rest. `check_same_data` looks for what such
loaders show: samplers that name another number of ranks, datasets of different lengths or subsets, and first data that
differ although no random numbers are in them. Of data that random numbers change it cannot tell.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import Subset

from lightning_videoscale.compat.lightning import WRAPPED_SAMPLERS
from lightning_videoscale.parallel import Axis
from lightning_videoscale.strategies.batches.sharing import BatchSharing, bytes_in_memory, pickle_without_tensors

END = "the end of the data"
"""Stands for what is read when there is no more."""


class _Facts(NamedTuple):
    """What a rank knows of its loader.

    Attributes:
        problem: How it is sharded wrongly, if that can be seen.
        lengths: Of the dataset and the datasets in it.
        subsets: Digests of the indices of subsets.
        first: Digest of the first data; None if they could not be read.
    """

    problem: str | None
    lengths: tuple[int, ...]
    subsets: tuple[int, ...]
    first: int | None


def check_same_data(loader: Any, sharing: BatchSharing, first: int | None, is_fixed: Callable[[], bool]) -> None:
    """Compares what the ranks of a group would read; collective over it.

    Raises:
        ValueError: On all ranks, if their data differ.
    """
    datasets = list(_parts(loader, ("dataset", "datasets")))[1:]
    lengths = tuple(length for dataset in datasets if (length := sized_len(dataset)) is not None)
    subsets = tuple(digest_of_indices(list(dataset.indices)) for dataset in datasets if isinstance(dataset, Subset))
    everyone = sharing.gather(_Facts(_wrong_sharding(loader, sharing.dp), lengths, subsets, first))
    problem = next((facts.problem for facts in everyone if facts.problem), None)
    if problem is None and len({facts.lengths for facts in everyone}) > 1:
        problem = f"their datasets have different lengths ({[facts.lengths for facts in everyone]})"
    if problem is None and len({facts.subsets for facts in everyone}) > 1:
        problem = "their datasets are different subsets"
    if problem is None and len({facts.first for facts in everyone} - {None}) > 1:
        fixed = sharing.gather(is_fixed())
        if any(
            is_mine and facts.first is not None and facts.first != everyone[0].first
            for facts, is_mine in zip(everyone, fixed, strict=True)
        ):
            problem = "the first data of their loaders differ"
    if problem is not None:
        raise ValueError(
            f"Ranks {list(sharing.axis.ranks)} train on one batch that one of them reads for all, but {problem}. What "
            "only the others would read was never trained. Do not shard by the global rank: shard by "
            "strategy.data_parallel_rank and strategy.data_parallel_size, in train_dataloader "
            "self.trainer.strategy.data_parallel_rank and so on, or leave the sharding of a map-style dataset to the "
            "Trainer. Seed a generator that the data come with in the same way."
        )


def digest(data: Any) -> int | None:
    """A number for the tensors in any nested data, or for all of it if there are none; None if it cannot be pickled.

    The rest is left out as names of files, say, may differ between nodes that read the same.
    """
    try:
        structure, tensors = pickle_without_tensors(data)
    except Exception:
        return None
    state = hashlib.blake2b(b"" if tensors else structure, digest_size=8)
    for x in tensors:
        contents = bytes_in_memory(x.cpu().contiguous())  # which an equal tensor may have in another order
        state.update(str((x.dtype, x.shape)).encode() + contents.numpy().tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def digest_of_indices(indices: Any) -> int:
    """A number for what a sampler yields."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # or equal values would look different that are one object here and several there
    pickler.dump(indices)
    return int.from_bytes(hashlib.blake2b(file.getvalue(), digest_size=8).digest(), "little", signed=True)


class Reading:
    """The first thing that an iterator gives, be it an error.

    Attributes:
        digest: Of what was read; None for an error.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._values: list[Any] = []
        self._error: Exception | None = None
        try:
            self._values.append(next(iterator))
            self.digest = digest(self._values[0])
        except StopIteration:
            self._error, self.digest = StopIteration(), digest(END)  # without the frames that led there
        except Exception as error:
            self._error, self.digest = error, None

    def followed_by(self, rest: Iterable[Any]) -> Iterator[Any]:
        """Yields or raises what was read, which is not kept here, then what else there is."""
        if self._error is None:
            yield self._values.pop()
            yield from rest
        elif not isinstance(self._error, StopIteration):
            raise self._error


def _wrong_sharding(loader: Any, dp: Axis) -> str | None:
    """What a loader says of the ranks that it is for, if that is wrong."""
    for part in _parts(loader, ("sampler", "batch_sampler", *WRAPPED_SAMPLERS, "pipeline", "dataset")):
        replicas, rank = getattr(part, "num_replicas", 1), getattr(part, "rank", 0)
        if replicas > dp.size or (replicas == dp.size and rank != dp.rank):
            return (
                f"the {type(part).__name__} of their loader is for rank {rank} of {replicas} (this is data-parallel "
                f"rank {dp.rank} of {dp.size})"
            )
        is_webdatasets = str(getattr(part, "__module__", "")).startswith("webdataset.")
        if is_webdatasets and getattr(part, "__name__", "") == "split_by_node":
            return "webdataset's split_by_node gives each of them other shards"
    return None


def _parts(root: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """An object and what it holds under some names, at any depth; ``datasets`` and a ``pipeline`` are lists."""
    seen: set[int] = set()
    coming = [root]
    while coming:
        part = coming.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in names:
            held = getattr(part, name, None)
            coming += held if name in ("datasets", "pipeline") and isinstance(held, list) else [held]
