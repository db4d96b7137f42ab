"""Where a checkpoint is written: a folder on a file system that all ranks see, or behind a URL that fsspec knows.

Either way it is whole or not there, also for Lightning, which looks for files and folders by name:

    last.ckpt/                           a folder, renamed when it is complete
        .metadata, *.distcp, meta.pt

    s3://bucket/run/last.ckpt            an object, which is written last and in one piece, as `meta.pt` is
    s3://bucket/run/.last.ckpt.tensors/  what it names: a folder with a name of its own for each time it was saved
        5f0c…/.metadata, *.distcp

Object stores rename nothing. So the new tensors lie beside the old ones until the object names them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import fsspec  # type: ignore[import-untyped]
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from lightning_videoscale.compat.torch.checkpoint import url_reader, url_writer
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.user_paths import is_url, local

REST = "meta.pt"
TENSORS = ".metadata"
OF_DEEPSPEED = "zero_to_fp32.py"
"""What a checkpoint of Lightning's DeepSpeedStrategy holds."""

_BEGUN = ".begun"


class CheckpointPlace(Protocol):
    """Where one checkpoint is being written.

    Attributes:
        tensors_in: Where its tensors lie, from the folder of the checkpoint; empty if within it.
    """

    tensors_in: str

    def begin(self) -> None:
        """Makes room for the tensors; on rank 0."""

    def sees(self) -> bool:
        """Whether this rank sees what rank 0 has begun."""

    def writer(self) -> StorageWriter:
        """Returns what writes the tensors."""

    def publish(self, rest: bytes) -> None:
        """Puts the checkpoint in the place of what had its name, all at once; on rank 0."""

    def discard(self) -> None:
        """Removes what was begun; on rank 0."""


def place_of(path: str, token: str) -> CheckpointPlace:
    """Returns where a checkpoint is to be written; the token makes names nobody else uses, the same on all ranks."""
    return _Remote(path, token) if is_url(path) else _Local(local(path))


def remove(path: str | Path) -> None:
    """Removes a checkpoint, or any file, link or folder, if there is one."""
    if is_url(path):
        files, name = file_system(path)
        # First what names the rest: without it, nobody takes the rest for a checkpoint.
        for part in (name, _tensors_of(name)):
            files.invalidate_cache()
            if files.exists(part):
                files.rm(part, recursive=True)
        return
    path = local(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def previous_of(path: Path) -> Path:
    """The name that a folder has while another takes its place: ``last.previous.ckpt`` for ``last.ckpt``."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def file_system(url: str | Path) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it.

    Raises:
        CheckpointError: If it is no URL, or a package is missing.
    """
    if "://" not in str(url):
        raise CheckpointError(f"{url} is no URL any more: give URLs as str, since pathlib takes a slash away.")
    try:
        files, path = fsspec.core.url_to_fs(str(url).rstrip("/"))
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"Checkpoints cannot be kept at {url}: {error}.") from error
    return files, path


def read_object(url: str) -> bytes | None:
    """Returns the content of an object; None if there is none.

    Raises:
        CheckpointError: If it cannot be read, as without credentials.
    """
    files, path = file_system(url)
    try:
        content: bytes = files.cat_file(path)  # asks the store, not fsspec's memory of what is there
    except (FileNotFoundError, IsADirectoryError):
        return None
    except Exception as error:  # every store has errors of its own making
        raise CheckpointError(f"{url} cannot be read ({type(error).__name__}: {error}).") from error
    return content


def reader_of(folder: str | Path) -> StorageReader:
    """Returns what reads the tensors of a checkpoint from their folder."""
    return url_reader(str(folder)) if is_url(folder) else FileSystemReader(folder)


class _Local:
    tensors_in = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Lightning takes any name with ``hpc_ckpt_`` in it for a checkpoint to resume from.
        self._folder = path.with_name(f".{path.name.replace('_', '-')}.partial")

    def begin(self) -> None:
        _check_nothing_else_is_in(self._path)
        remove(self._folder)
        self._folder.mkdir(parents=True)

    def sees(self) -> bool:
        return self._folder.is_dir()

    def writer(self) -> StorageWriter:
        return FileSystemWriter(self._folder)

    def publish(self, rest: bytes) -> None:
        with (self._folder / REST).open("wb") as stream:
            stream.write(rest)
            stream.flush()
            os.fsync(stream.fileno())
        _replace(self._path, self._folder)

    def discard(self) -> None:
        remove(self._folder)


def _check_nothing_else_is_in(path: Path) -> None:
    """Refuses a folder that is no checkpoint, which a checkpoint would take the place of."""
    found = sorted(child.name for child in path.iterdir()) if path.is_dir() and not path.is_symlink() else []
    if found and not any(name in (REST, TENSORS, OF_DEEPSPEED) or name.endswith(".distcp") for name in found):
        raise CheckpointError(
            f"{path} is a folder that holds {found[:5]}, and a checkpoint would take its place: name one within it, "
            f"such as {path / 'last.ckpt'}."
        )


def _replace(path: Path, complete: Path) -> None:
    previous = previous_of(path)
    if path.exists() or path.is_symlink():
        remove(previous)
        path.rename(previous)  # folders cannot be exchanged in one step
    complete.rename(path)
    remove(previous)


class _Remote:
    def __init__(self, url: str, token: str) -> None:
        self._files, self._path = file_system(url)
        self._folder = f"{_tensors_of(self._path)}/{token}"
        self._url = f"{_tensors_of(url.rstrip('/'))}/{token}"
        self.tensors_in = "/".join(self._url.split("/")[-2:])

    def begin(self) -> None:
        self._files.pipe_file(f"{self._folder}/{_BEGUN}", b"1")

    def sees(self) -> bool:
        return read_object(f"{self._url}/{_BEGUN}") is not None

    def writer(self) -> StorageWriter:
        return url_writer(self._url)

    def publish(self, rest: bytes) -> None:
        self._files.pipe_file(self._path, rest)
        self._files.invalidate_cache()
        others = self._files.ls(self._folder.rpartition("/")[0], detail=False)
        for folder in others:  # of earlier times, and of jobs that were killed
            if folder.rstrip("/").rpartition("/")[2] != self._folder.rpartition("/")[2]:
                self._files.rm(folder, recursive=True)

    def discard(self) -> None:
        self._files.rm(self._folder, recursive=True)


def _tensors_of(path: str) -> str:
    """The hidden folder beside a checkpoint's object; without underscores, for the reason above."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name.replace('_', '-')}.tensors"
