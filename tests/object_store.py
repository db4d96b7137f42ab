"""Object stores in this process, S3 by moto and Google's by an emulator, found through the environment as a user's."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@dataclass(frozen=True)
class ObjectStore:
    """A store with one empty bucket.

    Attributes:
        environment: What s3fs has to find in ``os.environ``.
    """

    environment: Mapping[str, str]

    def put(self, key: str, content: bytes) -> str:
        """Writes an object and returns its URL."""
        files().pipe_file(f"{BUCKET}/{key}", content)
        return url(key)

    def keys(self, folder: str) -> list[str]:
        """The objects below a folder, by their names in it."""
        found = files().find(f"{BUCKET}/{folder}")
        return sorted(name.removeprefix(f"{BUCKET}/{folder}/") for name in found)

    def download(self, folder: str, to: Path) -> None:
        """Copies all objects below a folder."""
        for key in self.keys(folder):
            (to / key).parent.mkdir(parents=True, exist_ok=True)
            (to / key).write_bytes(files().cat_file(f"{BUCKET}/{folder}/{key}"))


def url(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


def files() -> Any:
    """fsspec's, without its memory of what was there."""
    found = fsspec.filesystem("s3")
    found.invalidate_cache()
    return found


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server that ends with the block; this process finds it meanwhile."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with patch.dict(os.environ, environment):
            # Servers of one process share what they hold.
            urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
            files().mkdir(BUCKET)
            yield ObjectStore(environment)
            fsspec.filesystem("s3").clear_instance_cache()
    finally:
        server.stop()


needs_google_store = pytest.mark.skipif(
    not all(map(find_spec, ("gcsfs", "gcp_storage_emulator"))),
    reason="`pip install gcsfs gcp-storage-emulator`: too many packages for the extra `dev`",
)


@contextmanager
def google_store() -> Iterator[Mapping[str, str]]:
    """A server that answers as Google's, with the bucket, and what ``os.environ`` must have for gcsfs to find it."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks the real service for the kind of bucket, by gRPC
    }
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        with patch.dict(os.environ, environment):
            yield environment
            fsspec.filesystem("gs").clear_instance_cache()
    finally:
        server.stop()
