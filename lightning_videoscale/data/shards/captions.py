"""Where the caption of a sample stands: in its ``.txt``, or in a field of its ``.json``, as video2dataset writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

CAPTION_KEYS = ("caption", "text", "prompt", "description")
"""Fields that are looked for, in this order and in any case, where there is no text in ``.txt``."""


class Caption(NamedTuple):
    """A caption, and the field that it was found in; empty where there is none, or it is that of ``.txt``."""

    text: str
    field: str = ""


def find_caption(text: str, fields: Any, key: str | None) -> Caption:
    """Finds the caption of a sample.

    A field that is asked for by name goes before ``.txt``; the usual fields are only looked for where that is empty.

    Args:
        text: Content of ``.txt``; empty where there is none.
        fields: Content of ``.json``; None where there is none. Only strings in an object are captions.
        key: Name of the field that is asked for. None: the usual ones.
    """
    text = text if text.strip() else ""  # an empty file may hold the end of a line
    fields = fields if isinstance(fields, dict) else {}
    if key is not None:
        return Caption(_whole(fields[key]), key) if _is_text(fields.get(key)) else Caption(text)
    if not text:
        for usual in CAPTION_KEYS:
            for name, value in fields.items():
                if name.lower() == usual and _is_text(value):
                    return Caption(_whole(value), name)
    return Caption(text)


def digest_of_captions(captions: Sequence[str]) -> str:
    """SHA-256 of captions in their order."""
    return hashlib.sha256(json.dumps(captions).encode()).hexdigest()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _whole(text: str) -> str:
    """A text with U+FFFD for half of a character, where JSON was cut within an emoji: no tokenizer takes the half."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
