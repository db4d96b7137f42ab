"""The format of a checkpoint, the same for all strategies and numbers of ranks.

    .metadata, *.distcp    the tensors by name, written by torch.distributed.checkpoint
    meta.pt                everything else, one torch.save

`write_checkpoint`   writes it, all ranks together, to a folder or URL (see `places`); it is whole or not there
`CheckpointFolder`   reads one, each rank for itself: any tensor, whole or as this rank holds it
`open_checkpoint`    the same, or what a strategy of Lightning's saved as one file
`read_weights`       reads the weights of either, without a Trainer

Tensors are named by where they are in nested dicts: ``("state_dict", "blocks.0.weight")``. Nothing that is read from a
checkpoint is executed: ``meta.pt`` is loaded with ``weights_only=True`` and ``.metadata``, which is a pickle, by an
unpickler that knows the few classes it consists of.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_unsafe_globals_in_checkpoint
from typing_extensions import override

from lightning_videoscale.compat.patching import patch
from lightning_videoscale.compat.torch.checkpoint import METADATA_CLASSES
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.first_rank import on_first
from lightning_videoscale.strategies.checkpoints.places import (
    OF_DEEPSPEED,
    REST,
    TENSORS,
    CheckpointPlace,
    previous_of,
    read_object,
    reader_of,
)
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors, StoredTensor
from lightning_videoscale.trained_weights import AVERAGES
from lightning_videoscale.user_paths import is_url, local

_TENSORS_IN = "lightning_videoscale/tensors_in"
"""In what is not a tensor: where the tensors lie, if not in the same folder."""


def write_checkpoint(
    place: CheckpointPlace,
    tensors: dict[str, Any],
    rest: bytes,
    group: dist.ProcessGroup | None = None,
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint in the place of whatever has its name; collective over all ranks.

    A job that is killed meanwhile leaves the previous checkpoint. Ranks that hold equal tensors under one name share
    the writing.

    Args:
        place: Where; the same on all ranks.
        tensors: Nested dicts of tensors; a rank may leave out what others have. Of a ``DTensor`` each rank writes its
            shard.
        rest: What else belongs to the checkpoint, from `pack`; rank 0's is kept.
        group: A group of all ranks; the default one if left out.
        on_written: Called when this rank has written its share.

    Raises:
        CheckpointError: On all ranks, if rank 0 cannot write there or a rank does not see what rank 0 wrote.
        CheckpointException: On all ranks, if a rank cannot write its share.
    """
    begin(place, group)
    writer = place.writer()
    write = writer.write_data

    def write_and_say(*args: Any) -> Any:
        written = write(*args)
        written.wait()
        on_written()
        return written

    patch(writer, "write_data", write_and_say)
    save(tensors, storage_writer=writer, process_group=group)
    on_first(lambda: place.publish(rest), "put the checkpoint into its place", group)


def begin(place: CheckpointPlace, group: dist.ProcessGroup | None = None) -> None:
    """Makes room for a checkpoint that all ranks can write to; collective over all ranks.

    Raises:
        CheckpointError: On all ranks, if rank 0 cannot write there or a rank does not see what rank 0 wrote.
    """
    on_first(place.begin, "write there", group)
    try:
        seen = "" if place.sees() else "not there"
    except CheckpointError as error:
        seen = str(error)
    blind = {rank: reason for rank, reason in enumerate(gather_over_ranks(seen, group)) if reason}
    if blind:
        raise CheckpointError(
            f"Ranks {list(blind)} do not see what rank 0 wrote ({next(iter(blind.values()))}): save checkpoints on a "
            "file system that all nodes share, or at a URL that they all reach, with the same credentials."
        )


def pack(rest: dict[str, Any], place: CheckpointPlace) -> bytes:
    """Returns as a file's content what is not a tensor by name; warns of what could not be loaded again."""
    stream = io.BytesIO()
    torch.save(rest | ({_TENSORS_IN: place.tensors_in} if place.tensors_in else {}), stream)
    stream.seek(0)
    unsafe = get_unsafe_globals_in_checkpoint(stream)
    if unsafe:
        rank_zero_warn(
            f"The checkpoint holds objects that are not loaded from a file without being told so: {unsafe}. They come "
            "from hyperparameters, callbacks or on_save_checkpoint: save plain numbers, strings and tensors instead, "
            f"or call torch.serialization.add_safe_globals([...]) with them before loading the checkpoint."
        )
    return stream.getvalue()


class CheckpointFolder:
    """A checkpoint to read from; needs no other ranks.

    Args:
        path: What `write_checkpoint` wrote, by path or URL; also a copy of a folder behind a URL, or of a URL's objects
            in a folder. Where a job was killed while it put another checkpoint in a folder's place, the previous one
            is read.
        trusted: Load arbitrary objects from ``meta.pt``, which can run code.

    Attributes:
        path: Where it is.
        rest: What is not a tensor by name.

    Raises:
        CheckpointError: If there is no such checkpoint, or it holds something else.
    """

    def __init__(self, path: str | Path, trusted: bool = False) -> None:
        rest, tensors = _find(path, trusted)
        if tensors is None:
            raise CheckpointError(f"{path} is not a checkpoint of lightning-videoscale: it is a file.")
        self._open(rest, tensors)

    @classmethod
    def of(cls, rest: dict[str, Any], tensors: str | Path) -> CheckpointFolder:
        """Returns the checkpoint whose parts were found."""
        folder = cls.__new__(cls)
        folder._open(rest, tensors)
        return folder

    def _open(self, rest: dict[str, Any], tensors: str | Path) -> None:
        self.path, self.rest = tensors, rest
        with _said_of(f"{tensors}/{TENSORS}"):
            self._metadata: Metadata = _MetadataUnpickler(io.BytesIO(_read_metadata(tensors))).load()
            for stored in self._metadata.storage_data.values():
                _check_stays(stored.relative_path, parts=1)
        self._keys: dict[tuple[str, ...], dict[str, str]] = {}
        for key, place in self._metadata.planner_data.items():
            self._keys.setdefault(place[:-1], {})[place[-1]] = key
        self._reader = reader_of(tensors)
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
        with _said_of(f"{key} in {self.path}"):
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
    found = open_checkpoint(path)
    if isinstance(found, CheckpointFolder):
        values, averages = found.tensors("state_dict"), found.averages()
    else:
        values, averages = SavedTensors(found["state_dict"]), found.get(AVERAGES, {})
    if averaged:
        if not averages:
            raise CheckpointError(f"{path} holds no averaged weights: it was saved without the callback EMA.")
        values |= averages
    prefix = f"{module}." if module else ""
    weights = {name.removeprefix(prefix): values[name] for name in values if name.startswith(prefix)}
    if not weights:
        if not values and isinstance(found, CheckpointFolder) and "state_dict" not in found.rest:
            raise shards_of_lightning(path)
        children = sorted({name.split(".")[0] for name in values})
        raise CheckpointError(f"{path} has no weights of a module {module!r}; it has those of {children}.")
    return weights


def open_checkpoint(path: str | Path, trusted: bool = False) -> CheckpointFolder | dict[str, Any]:
    """Opens a checkpoint of ours, or reads one that a strategy of Lightning's saved as one file.

    Args:
        path: Its path or URL. Tensors of a local file stay on disk until they are used.
        trusted: Load arbitrary objects, which can run code.

    Raises:
        CheckpointError: If it is neither.
    """
    rest, tensors = _find(path, trusted)
    if tensors is not None:
        return CheckpointFolder.of(rest, tensors)
    rest = _consolidated(rest)
    if not isinstance(rest, dict) or "state_dict" not in rest:
        raise CheckpointError(f"{path} is not a checkpoint of Lightning's: it has no 'state_dict'.")
    return rest


def shards_of_lightning(path: str | Path) -> CheckpointError:
    """The error for a folder that Lightning wrote, whose files have the names of ours."""
    return CheckpointError(
        f"{path} holds shards that Lightning's FSDPStrategy or ModelParallelStrategy saved. Make one file of them by "
        f"`fabric consolidate {path}`, and start from that file."
    )


def _consolidated(rest: Any) -> Any:
    """Puts what `fabric consolidate` made of a Trainer's shards where the Trainer's other checkpoints have it."""
    if isinstance(rest, dict) and "pytorch-lightning_version" in rest and "optimizer_states" not in rest:
        names = [name for name in map("optimizer_{}".format, range(len(rest))) if name in rest]
        rest = {("state_dict" if name == "model" else name): value for name, value in rest.items()}
        rest |= {"optimizer_states": [rest.pop(name) for name in names]} if names else {}
    return rest


def _find(path: str | Path, trusted: bool) -> tuple[Any, str | Path | None]:
    """What is not a tensor by name, and the folder of the tensors; of a single file all, and None."""
    rest: Any
    folder: str | Path
    if is_url(path):
        url = str(path).rstrip("/")
        if (content := read_object(url)) is None:
            if (content := read_object(f"{url}/{REST}")) is None:
                raise CheckpointError(f"{path} is not a checkpoint of lightning-videoscale: nothing is there.")
            return _load(io.BytesIO(content), url, trusted), url
        rest, folder = _load(io.BytesIO(content), url, trusted), url.rpartition("/")[0]
    else:
        path = local(path)
        if not path.exists() and previous_of(path).exists():
            path = previous_of(path)
        if not path.is_file():
            if not (path / REST).is_file() or not (path / TENSORS).is_file():
                raise CheckpointError(f"{path} is not a checkpoint of lightning-videoscale: {_what_is(path)}.")
            return _load(path / REST, path / REST, trusted), path
        rest, folder = _load(path, path, trusted, mmap=True), path.parent
    where = rest.pop(_TENSORS_IN, None) if isinstance(rest, dict) else None
    if where:
        _check_stays(where, parts=2)
    return rest, f"{folder}/{where}" if where else None


def _check_stays(where: str, parts: int) -> None:
    """Refuses what leaves the folder of a checkpoint: it could name any file of the user's."""
    found = PurePosixPath(where).parts
    if len(found) != parts or found[0] in ("/", ".."):
        raise CheckpointError(f"A checkpoint names {where}, which is not in its folder: nothing is read from there.")


def _read_metadata(folder: str | Path) -> bytes:
    if is_url(folder):
        content = read_object(f"{folder}/{TENSORS}")
    else:
        content = (Path(folder) / TENSORS).read_bytes() if (Path(folder) / TENSORS).is_file() else None
    if content is None:
        raise CheckpointError(
            f"The tensors of the checkpoint are not in {folder}: copy that folder too, whose name begins with a dot."
        )
    return content


def _load(file: Any, name: str | Path, trusted: bool, mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds objects that are not loaded without being told so ({error}). If you trust the file, call "
            "torch.serialization.add_safe_globals([...]) with them first."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:  # no file of torch.save, or a part of one
        raise CheckpointError(
            f"{name} is not a checkpoint, or is damaged: {str(error).partition(chr(10))[0]} A checkpoint of "
            "lightning-videoscale is the folder that trainer.save_checkpoint or ModelCheckpoint wrote."
        ) from error


@contextmanager
def _said_of(what: str) -> Iterator[None]:
    """Names what cannot be read, as most errors do not."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # pickle, torch and every store have errors of their own making
        raise CheckpointError(
            f"{what} cannot be read ({type(error).__name__}: {error}). It is damaged, or was not copied whole: take "
            "another checkpoint, or copy it again."
        ) from error


def _what_is(path: Path) -> str:
    if not path.exists():
        return "nothing is there"
    found = sorted(child.name for child in path.iterdir())
    if OF_DEEPSPEED in found or (path / "checkpoint").is_dir():
        return f"it was saved by Lightning's DeepSpeedStrategy; convert it with its {OF_DEEPSPEED}"
    return f"it holds {found[:5]}, and {[name for name in (REST, TENSORS) if name not in found]} is missing"


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint's metadata consists of, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        known = name in METADATA_CLASSES.get(module, ())
        if module == "torch":
            known = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise CheckpointError(f"A checkpoint's {TENSORS} names {module}.{name}, which has no place there.")
        return super().find_class(module, name)
