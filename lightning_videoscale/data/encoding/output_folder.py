"""The folder that samples are encoded to: its own, and what it was made of in ``encoded.json``."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.location import is_remote

_SETTINGS = "encoded.json"
_CAPTIONS = "captions"
LATENTS = "latents"
"""What tells latents from others of their sizes; folders of older releases do not know it."""


def begin_output(output: Path, sources: Sequence[str], made_by: Mapping[str, Any]) -> None:
    """Begins a folder, or goes on with it.

    Args:
        output: The folder.
        sources: The shards that are encoded.
        made_by: What the result depends on, as JSON can hold it; ``captions`` may be None, which is not compared, and
            `LATENTS` is compared where the folder has it.

    Raises:
        ShardError: If it holds something else than what `begin_output` has begun, with the same ``made_by``, or
            ``encoded.json`` is damaged.
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
    if is_new := not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        _write_settings(file, wanted)
    found = _read_settings(file)
    wanted = {name: value for name, value in wanted.items() if name != LATENTS or name in found}
    is_unknown = None in (found.get(_CAPTIONS), wanted[_CAPTIONS])
    _check_same(output, found, wanted, but=_CAPTIONS if is_unknown else "")
    if is_unknown and not is_new:
        _go_on_without_captions(file, found, wanted[_CAPTIONS])


def _check_same(output: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], but: str) -> None:
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name) and name != but]
    if names:
        was, now = ({name: of.get(name) for name in names} for of in (found, wanted))
        captions = " Its shards hold the captions of then." * (_CAPTIONS in names)
        raise ShardError(
            f"{output} was begun with {was}, and now they are {now}: choose another folder, or the same settings."
            f"{captions}"
        )


def _go_on_without_captions(file: Path, found: Mapping[str, Any], captions: str | None) -> None:
    """Says that captions cannot be compared, and notes those of now, so that the next run can."""
    older, remedy = "the folder", "choose another folder if they have"
    if captions is None:
        older, remedy = "the index of the shards", "delete the index, and it is made anew"
    else:
        _write_settings(file, {**found, _CAPTIONS: captions})
    warnings.warn(
        f"Whether captions have changed since {file.parent} was begun cannot be told, as {older} is of an older "
        f"release: {remedy}.",
        stacklevel=4,
    )


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(
            f"{file} is damaged ({error}), so that nobody knows what {file.parent} was made of: delete this folder, "
            "and encode anew."
        ) from error
    return settings


def _write_settings(file: Path, settings: Mapping[str, Any]) -> None:
    write_whole(file, json.dumps(settings, indent=1).encode())


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
