"""What the metadata of a distributed checkpoint consists of, and its files behind URLs."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from lightning_videoscale.compat.torch import TORCH

METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}
"""By module, the classes that ``.metadata`` names, which is a pickle. torch reads it with pickle alone."""

_FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"


def url_writer(url: str) -> StorageWriter:
    """Returns what writes the tensors of a distributed checkpoint to a folder behind a URL."""
    # Stores keep what they have accepted; to make sure of files, torch would empty the caches of the whole machine.
    writer: StorageWriter = TORCH.get(_FSSPEC, "FsspecWriter")(url, sync_files=False)
    return writer


def url_reader(url: str) -> StorageReader:
    """Returns what reads tensors from there, each by one request for its bytes; it reads no metadata.

    torch's own opens a file for each tensor, and fsspec then reads megabytes ahead.
    """
    reader: Any = TORCH.get(_FSSPEC, "FsspecReader")(url)
    files = TORCH.get(reader.fs, "fs")

    def opened(path: str, mode: str) -> AbstractContextManager[str]:
        return nullcontext(path)

    def part(path: str, stored: Any) -> io.BytesIO:
        return io.BytesIO(files.cat_file(path, start=stored.offset, end=stored.offset + stored.length))

    TORCH.put(reader.fs, "create_stream", opened)
    TORCH.put(reader, "_slice_file", part)
    found: StorageReader = reader
    return found
