"""Opening Parquet files with pyarrow, which is imported when the first one is met."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_videoscale.data.shards.errors import ShardError


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """Opens a ``pyarrow.parquet.ParquetFile``.

    Raises:
        ModuleNotFoundError: If pyarrow is not installed.
        ShardError: If the file is damaged, also while it is open.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {file} needs pyarrow: pip install 'lightning-videoscale[parquet]'."
        ) from error
    try:
        with ParquetFile(file) as parquet:
            yield parquet
    except pyarrow.ArrowException as error:
        raise ShardError(f"{file} is no Parquet file, or is damaged: {error}") from error


def plain_columns(schema: Any) -> list[str]:
    """Columns that hold no bytes: what can be a field of ``json``."""
    return [field.name for field in schema if "binary" not in str(field.type)]


def parquet_rows(file: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The plain columns of a table, and its rows; raises as `open_parquet` does."""
    with open_parquet(file) as parquet:
        columns = plain_columns(parquet.schema_arrow)
        return columns, parquet.read(columns=columns).to_pylist()
