"""torch's writer and reader of tensors behind URLs."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, save
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from lightning_videoscale.compat.torch import checkpoint


class Noted(MemoryFileSystem):
    """Objects in memory, which tells of what was read."""

    protocol = "noted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[list[str]] = []
    parts: ClassVar[list[tuple[int, int]]] = []

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            self.opened.append(path)
        return super()._open(path, mode, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        assert start is not None and end is not None
        self.parts.append((start, end))
        content: bytes = self.store[path].getvalue()
        return content[start:end]


@pytest.fixture
def url() -> str:
    fsspec.register_implementation("noted", Noted, clobber=True)
    for kept in (Noted.store, Noted.opened, Noted.parts):
        kept.clear()
    return "noted://bucket/tensors"


@pytest.fixture
def written(url: str) -> tuple[str, dict[str, torch.Tensor]]:
    """A checkpoint of two tensors, and these."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.full((3,), 7.0, dtype=torch.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        save(tensors, storage_writer=checkpoint.url_writer(url))
    return url, tensors


def test_tensors_are_written_behind_a_url(written: tuple[str, Any], tmp_path: Any) -> None:
    _, tensors = written
    for path, stored in Noted.store.items():
        (tmp_path / path.rpartition("/")[2]).write_bytes(stored.getvalue())
    assert read(FileSystemReader(tmp_path), FileSystemReader(tmp_path).read_metadata(), tensors) == []


def test_tensors_are_read_by_a_request_each(written: tuple[str, Any]) -> None:
    url, tensors = written
    metadata = fsspec_metadata(url)
    Noted.opened.clear()
    assert read(checkpoint.url_reader(url), metadata, tensors) == []
    assert Noted.opened == []
    stored = metadata.storage_data.values()
    assert sorted(Noted.parts) == sorted((part.offset, part.offset + part.length) for part in stored)
    assert len(Noted.parts) == 2


def fsspec_metadata(url: str) -> Any:
    """By torch's own reader, which ours takes it from."""
    return FsspecReader(url).read_metadata()


def read(reader: Any, metadata: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Reads them, and returns the names of those that are not the same."""
    found = {name: torch.zeros_like(x) for name, x in tensors.items()}
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(found, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return [name for name, x in tensors.items() if not torch.equal(found[name], x)]
