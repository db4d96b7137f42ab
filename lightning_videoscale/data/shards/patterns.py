"""Which shards a pattern means: local paths and URLs, as WebDataset users write them."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fsspec import available_protocols  # type: ignore[import-untyped]
from webdataset.shardlists import expand_urls

from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.location import SCHEME, identities, is_remote
from lightning_videoscale.data.shards.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from lightning_videoscale.data.shards.remote import matching
from lightning_videoscale.user_paths import local

Patterns = str | Path | list[str | Path] | list[str] | list[Path]


def expand_each(shards: Patterns, of_folder: Callable[[Path], list[str]] | None = None) -> list[list[str]]:
    """Turns the patterns that WebDataset users write into shards.

    Args:
        shards: One pattern or several. Braces (``{000..099}``, ``{train,extra}``) and ``::`` mean what they mean in
            WebDataset, but for fsspec's ``simplecache::https://…``; ``*``, ``?`` and ``[...]`` match what exists,
            sorted by name, ``**/`` folders of any depth, and ``~`` the user's home. URLs are those of fsspec. A local
            folder with shards means these, but for hidden ones.
        of_folder: Returns the shards of any other local folder. None: it is an error.

    Returns:
        Local paths and URLs, by pattern. That a URL without ``*`` exists is found out when it is read.

    Raises:
        ShardError: If a pattern is a command (``pipe:``), names a local file that does not exist, or matches none; if
            one shard is named twice; or if a bucket or folder behind a URL is missing or cannot be listed.
    """
    patterns = [str(pattern) for pattern in ([shards] if isinstance(shards, (str, Path)) else shards)]
    each = [[url for part in _expanded(pattern) for url in _shards_of(part, of_folder)] for pattern in patterns]
    empty = [pattern for pattern, urls in zip(patterns, each, strict=True) if not urls]
    if empty or not patterns:
        raise ShardError(f"No shards found: the patterns {empty} match no file. The current folder is {Path.cwd()}.")
    urls = [url for urls in each for url in urls]
    if missing := [url for url in urls if not (is_remote(url) or os.path.isfile(url))]:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ShardError(
            f"No shards found at {len(missing)} of the {len(urls)} places that {patterns} names: {shown}. "
            f"The current folder is {Path.cwd()}; check the path and the range in braces."
        )
    shard, times = Counter(identities(urls)).most_common(1)[0]
    if times > 1:
        raise ShardError(f"The shard {shard} is named twice by {patterns}; name every shard once.")
    return each


def _expanded(pattern: str) -> list[str]:
    """What WebDataset makes of a pattern, but for URLs that fsspec reads through another: ``simplecache::https://…``."""
    parts = pattern.split("::")
    found: list[str] = []
    through = ""
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if part.strip() in available_protocols() and is_remote(following):
            through = f"{part.strip()}::"
        else:
            found += [through + url for url in expand_urls(part)]
            through = ""
    return found


def _shards_of(url: str, of_folder: Callable[[Path], list[str]] | None) -> list[str]:
    if is_remote(url):
        return matching(url.strip())
    if scheme := SCHEME.match(url):
        why = "would run a command" if scheme[1] == "pipe" else "is no URL of fsspec, which has '://'"
        raise ShardError(
            f"The shard {url!r} {why}; only files are read. Give a path, or a URL such as 's3://bucket/000.tar' "
            f"(a local name that holds a colon is written './{url}')."
        )
    url = str(local(url)) if url.startswith("~") else url  # as a path, './a:b' would lose its beginning
    is_pattern = any(c in url for c in "*?[") and not Path(url).exists()
    found = sorted(glob.glob(_with_folders_literal(url), recursive=True)) if is_pattern else [url]
    return [shard for path in found for shard in _shards_at(Path(path), path, of_folder)]


def _with_folders_literal(pattern: str) -> str:
    """A pattern whose first folders, as far as they exist by these names, mean themselves: ``runs [1]/*.tar``."""
    folder, slash, rest = pattern.rpartition("/")
    while slash and folder and not os.path.isdir(folder):
        folder, slash, last = folder.rpartition("/")
        rest = f"{last}/{rest}"
    return f"{glob.escape(folder)}{slash}{rest}"


def _shards_at(path: Path, name: str, of_folder: Callable[[Path], list[str]] | None) -> list[str]:
    """The shards that a path leads to; raises ShardError with the command that was meant."""
    if path.is_dir():
        # Not hidden ones: what `videoscale pack` has not finished, and what macOS puts beside files.
        shards = sorted(str(shard) for shard in path.glob("*.tar") if not shard.name.startswith("."))
        if shards and (media := next(filter(_is_media, path.iterdir()), None)):
            raise ShardError(
                f"{path} holds {len(shards)} shards, and videos or images beside them ({media.name}): name the shards, "
                f"'{path}/*.tar', or move the others and give their folder."
            )
        if not shards and of_folder is None:
            raise ShardError(
                f"{path} is a folder without shards. Videos and images are packed into shards first: "
                f"videoscale pack '{path}' OUTPUT"
            )
        return shards or (of_folder(path) if of_folder is not None else [])
    if path.is_file() and _is_media(path):
        raise ShardError(
            f"{path} is a video or an image, and no shard. Name the folder that it is in, '{path.parent}', or pack it "
            f"into shards first: videoscale pack '{path.parent}' OUTPUT"
        )
    return [name]


def _is_media(file: Path) -> bool:
    return file.suffix[1:].lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES and not file.name.startswith(".")
