"""The folder that samples are encoded to: its own, and what it was made of in ``encoded.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.location import is_remote

_SETTINGS = "encoded.json"


def begin_output(output: Path, sources: Sequence[str], made_by: Mapping[str, Any]) -> None:
    """Begins a folder, or goes on with it.

    Args:
        output: The folder.
        sources: The shards that are encoded.
        made_by: What the result depends on, as JSON can hold it.

    Raises:
        ShardError: If it holds something else than what `begin_output` has begun, with the same ``made_by``.
    """
    _check_no_source(output, sources)
    wanted = json.loads(json.dumps(made_by))
    file = output / _SETTINGS
    # Others' drafts are hidden. The file is looked for last, since another rank may be beginning the folder.
    others = [path.name for path in output.iterdir() if not path.name.startswith(".")] if output.exists() else []
    if others and not file.exists():
        raise ShardError(
            f"{output} holds {len(others)} files ({', '.join(sorted(others)[:3])}) and no {_SETTINGS} of an earlier "
            "run: choose a new folder."
        )
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(wanted, indent=1).encode())
    found = json.loads(file.read_text(encoding="utf-8"))
    if different := [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]:
        was, now = ({name: of.get(name) for name in different} for of in (found, wanted))
        raise ShardError(
            f"{output} was begun with {was}, and now they are {now}: choose another folder, or the same settings."
        )


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file that appears under its name when it is complete."""
    draft = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)


def _check_no_source(output: Path, sources: Sequence[str]) -> None:
    """Pieces have the names that `videoscale pack` gives its shards: they would be taken for done, or overwritten."""
    folders = {os.path.dirname(url) for url in sources if not is_remote(url)}
    if any(os.path.realpath(folder) == os.path.realpath(output) for folder in folders):
        raise ShardError(f"{output} holds the shards that are to be encoded: choose another folder (--output).")
