"""What several commands ask for in the same way."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from lightning_videoscale.families import AllFamilies
from lightning_videoscale.user_paths import is_url, local


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def positive(text: str) -> int:
    """An integer of at least one.

    Raises:
        argparse.ArgumentTypeError: If it is not.
    """
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def at_least(least: int, text: str) -> int:
    """An integer that is not smaller.

    Raises:
        argparse.ArgumentTypeError: If it is.
    """
    if not text.removeprefix("-").isdecimal() or (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return number


def share(text: str) -> float:
    """A number between 0 and 1.

    Raises:
        argparse.ArgumentTypeError: If it is not.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and 1")
    return number


def one_of(kind: str, text: str) -> str:
    """A name that model families know; not by ``choices``, which ``--help`` would read from all of them.

    Raises:
        argparse.ArgumentTypeError: If none knows it.
    """
    names: AllFamilies[object] = AllFamilies(kind)
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return text


def area(text: str) -> int:
    """The area of ``HEIGHTxWIDTH``, in pixels.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if not (size := re.fullmatch(r"(\d+)x(\d+)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, such as 480x832")
    return int(size[1]) * int(size[2])


def local_folder(text: str) -> Path:
    """A folder on a disk, also from the user's home where the shell has left ``~``, as behind ``--output=``.

    Raises:
        argparse.ArgumentTypeError: If it is a URL.
    """
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: name a folder on a disk, and copy it from there")
    return local(text)


def add_shards(parser: argparse.ArgumentParser) -> None:
    """Adds the argument ``shards`` and the option ``--captions``."""
    parser.add_argument(
        "shards",
        nargs="+",
        help="tars: paths or URLs, with {000..099} and * as in WebDataset; or folders of videos and images, which are "
        "packed first, into FOLDER.packed beside each",
    )
    parser.add_argument(
        "--captions", type=Path, metavar="FILE", help="captions of the folders, as `videoscale pack` takes them"
    )
