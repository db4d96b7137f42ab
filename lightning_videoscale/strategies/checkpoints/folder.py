"""The format of a checkpoint, the same for all strategies and numbers of ranks: a folder.

    last.ckpt/
        .metadata, *.distcp    the tensors by name, written by torch.distributed.checkpoint
        meta.pt                everything else, one torch.save

`write_checkpoint`   writes a folder, all ranks together; a folder is complete or not there
`CheckpointFolder`   reads one, each rank for itself: any tensor, whole or as this rank holds it
`read_single_file`   reads what a strategy of Lightning's saved
`read_weights`       reads the weights of either, without a Trainer

Tensors are named by where they are in nested dicts: ``("state_dict", "blocks.0.weight")``. Nothing that is read from a
checkpoint is executed: ``meta.pt`` is loaded with ``weights_only=True`` and ``.metadata``, which is a pickle, by an
unpickler that knows the few classes it consists of.
"""

from __future__ import annotations

import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_unsafe_globals_in_checkpoint
from typing_extensions import override

from lightning_videoscale.compat.torch.checkpoint import METADATA_CLASSES
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors, StoredTensor
from lightning_videoscale.trained_weights import AVERAGES

_REST = "meta.pt"
_TENSORS = ".metadata"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says why and what to do."""


def write_checkpoint(path: Path, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
    """Writes a checkpoint in the place of whatever is at ``path``; collective over all ranks.

    The folder is written under another name and renamed when it is complete: a job that is killed meanwhile leaves the
    previous checkpoint. Ranks that hold equal tensors under one name share the writing.

    Args:
        path: The folder, on a file system that all ranks see.
        tensors: Nested dicts of tensors; a rank may leave out what others have. Of a ``DTensor`` each rank writes its
            shard.
        rest: What else belongs to the checkpoint; rank 0's is kept.

    Raises:
        CheckpointError: If a rank does not see the folder that rank 0 made.
    """
    # Lightning takes any name with ``hpc_ckpt_`` in it for a checkpoint to resume from.
    folder = path.with_name(f".{path.name.replace('_', '-')}.partial")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        remove(folder)
        folder.mkdir(parents=True)
    _all_ranks(None)
    blind = [rank for rank, sees in enumerate(_all_ranks(folder.is_dir())) if not sees]
    if blind:
        raise CheckpointError(
            f"Ranks {blind} do not see {folder}, which rank 0 made: save checkpoints on a file system that all nodes "
            "share."
        )
    save(tensors, storage_writer=FileSystemWriter(folder))
    if first:
        _write_rest(folder / _REST, rest)
        _replace(path, folder)
    _all_ranks(None)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def previous_of(path: Path) -> Path:
    """The name that a checkpoint has while another takes its place: ``last.previous.ckpt`` for ``last.ckpt``."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _replace(path: Path, complete: Path) -> None:
    previous = previous_of(path)
    if path.exists() or path.is_symlink():
        remove(previous)
        path.rename(previous)  # folders cannot be exchanged in one step
    complete.rename(path)
    remove(previous)


def _write_rest(file: Path, rest: dict[str, Any]) -> None:
    with file.open("wb") as stream:
        torch.save(rest, stream)
        stream.flush()
        os.fsync(stream.fileno())
    unsafe = get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        rank_zero_warn(
            f"The checkpoint holds objects that are not loaded from a file without being told so: {unsafe}. They come "
            "from hyperparameters, callbacks or on_save_checkpoint: save plain numbers, strings and tensors instead, "
            f"or call torch.serialization.add_safe_globals([...]) with them before loading the checkpoint."
        )


class CheckpointFolder:
    """A checkpoint to read from; needs no other ranks.

    Args:
        path: A folder written by `write_checkpoint`. Where a job was killed while it put another checkpoint in its
            place, the previous one is read.
        trusted: Load arbitrary objects from ``meta.pt``, which can run code.

    Attributes:
        rest: What is not a tensor by name.

    Raises:
        CheckpointError: If there is no such folder, or it holds something else.
    """

    def __init__(self, path: Path, trusted: bool = False) -> None:
        if not path.exists() and previous_of(path).exists():
            path = previous_of(path)
        if not (path / _REST).is_file() or not (path / _TENSORS).is_file():
            raise CheckpointError(f"{path} is not a checkpoint of lightning-videoscale: {_what_is(path)}.")
        self.path = path
        self.rest: dict[str, Any] = _load(path / _REST, trusted)
        with (path / _TENSORS).open("rb") as stream:
            self._metadata: Metadata = _MetadataUnpickler(stream).load()
        self._keys: dict[tuple[str, ...], dict[str, str]] = {}
        for key, place in self._metadata.planner_data.items():
            self._keys.setdefault(place[:-1], {})[place[-1]] = key
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def has_averages(self) -> bool:
        """Whether the callback `EMA` kept averages of the weights."""
        return AVERAGES in self.sections()

    def averages(self) -> SavedTensors:
        """Returns these averages by name; nothing if there are none."""
        return self.tensors(AVERAGES)

    def sections(self, *section: str) -> list[str]:
        """Returns the names of the sections in a section."""
        return [place[-1] for place in self._keys if place[:-1] == section]

    def tensors(self, *section: str) -> SavedTensors:
        """Returns the tensors in a section by name; reads none yet."""
        keys = self._keys.get(section, {})
        return SavedTensors(
            {name: StoredTensor(self._stored(key).size, partial(self._read, key)) for name, key in keys.items()}
        )

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} holds a pickled object where a tensor should be: {key}.")
        return stored

    def _read(self, key: str, like: Tensor | None) -> Tensor:
        stored = self._stored(key)
        if like is not None and like.shape == stored.size:
            target = torch.empty_like(like.detach(), dtype=stored.properties.dtype)
        else:
            target = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({key: target}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return target


def read_weights(path: str | Path, module: str = "", averaged: bool = False) -> dict[str, Tensor]:
    """Reads the weights of a checkpoint without a Trainer, as for ``model.load_state_dict(read_weights(path, "net"))``.

    Args:
        path: A checkpoint of ours, or a single file of Lightning's.
        module: Path, within the LightningModule, of the network whose weights are wanted; all if empty.
        averaged: The averages that the callback `EMA` kept, with the weights of what it does not average.

    Returns:
        Whole tensors on the CPU, by their names within the network; without what the checkpoint leaves out, such as the
        frozen base of adapters: there, load with ``strict=False`` into a network that has it.

    Raises:
        CheckpointError: If that is no checkpoint, nothing in it belongs to the network, or it has no averages.
    """
    path = Path(path)
    if path.is_file():
        single = read_single_file(path)
        values, averages = SavedTensors(single["state_dict"]), single.get(AVERAGES, {})
    else:
        folder = CheckpointFolder(path)
        values, averages = folder.tensors("state_dict"), folder.averages()
    if averaged:
        if not averages:
            raise CheckpointError(f"{path} holds no averaged weights: it was saved without the callback EMA.")
        values |= averages
    prefix = f"{module}." if module else ""
    weights = {name.removeprefix(prefix): values[name] for name in values if name.startswith(prefix)}
    if not weights:
        children = sorted({name.split(".")[0] for name in values})
        raise CheckpointError(f"{path} has no weights of a module {module!r}; it has those of {children}.")
    return weights


def read_single_file(file: Path, trusted: bool = False) -> dict[str, Any]:
    """Reads a checkpoint that a strategy of Lightning's saved as one file; tensors stay on disk until they are used.

    Args:
        file: The file.
        trusted: Load arbitrary objects, which can run code.

    Raises:
        CheckpointError: If it is no checkpoint of Lightning's.
    """
    checkpoint = _load(file, trusted, mmap=True)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{file} is not a checkpoint of Lightning's: it has no 'state_dict'.")
    return checkpoint


def _load(file: Path, trusted: bool, mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds objects that are not loaded without being told so ({error}). If you trust the file, call "
            "torch.serialization.add_safe_globals([...]) with them first."
        ) from error


def _what_is(path: Path) -> str:
    if not path.exists():
        return "nothing is there"
    if path.is_file():
        return "it is a file"
    found = sorted(child.name for child in path.iterdir())
    if "zero_to_fp32.py" in found or (path / "checkpoint").is_dir():
        return "it was saved by Lightning's DeepSpeedStrategy; convert it with its zero_to_fp32.py"
    return f"it holds {found[:5]}, and {[name for name in (_REST, _TENSORS) if name not in found]} is missing"


def _all_ranks(value: Any) -> list[Any]:
    """Every rank's value; a barrier too."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint's metadata consists of, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        known = name in METADATA_CLASSES.get(module, ())
        if module == "torch":
            known = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise CheckpointError(f"A checkpoint's {_TENSORS} names {module}.{name}, which has no place there.")
        return super().find_class(module, name)
