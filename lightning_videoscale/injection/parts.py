"""The norms of a block, whose work its fused forward does itself: what they must be, for that to be the same.

A `FusedBlock` lists them, and the machinery looks at them when it replaces a block and in every call::

    parts = (Part("norm1", ADA_LAYER_NORM_ZERO), Part("norm1.norm", LAYER_NORM), Part("norm2", LAYER_NORM))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.methods import difference


def _fits_always(module: Any) -> str | None:
    return None


@dataclass(frozen=True)
class KnownClass:
    """A class of modules whose computation is known.

    Attributes:
        class_path: ``"package.module.ClassName"``.
        name: For messages.
        known_forwards: `source_hash` of every forward that is meant, each with the releases that have it; None for
            torch's own, which are what they are documented to be.
        misfit: Returns what a module of the class has that is not meant, None if nothing.
    """

    class_path: str
    name: str
    known_forwards: Mapping[str, str] | None = field(default=None, hash=False)
    misfit: Callable[[Any], str | None] = _fits_always


@dataclass(frozen=True, init=False)
class Part:
    """A module that a fused forward does not call.

    Args:
        path: In the block.
        *kinds: What it may be.
        optional: Whether some blocks have None in its place.
    """

    path: str
    kinds: tuple[KnownClass, ...]
    optional: bool

    def __init__(self, path: str, *kinds: KnownClass, optional: bool = False) -> None:
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "optional", optional)

    def of(self, block: nn.Module) -> Any:
        """What it is in a block; None where there is none."""
        module: Any = block
        for name in self.path.split("."):
            module = getattr(module, name, None)
        return module


def changed_part(block: nn.Module, parts: tuple[Part, ...]) -> str | None:
    """Returns which part is not, or no longer, what it must be, and how; None if all are. Asked in every call."""
    for part in parts:
        module = part.of(block)
        if module is None and part.optional:
            continue
        path = class_path(type(module))
        kind = next((kind for kind in part.kinds if kind.class_path == path), None)
        if kind is None:
            return f"{part.path} is not {' or '.join(kind.name for kind in part.kinds)}, but {path}"
        other = kind.misfit(module)
        if other is None:
            other = changed(module)
        if other is not None:
            return f"{part.path} {other}"
    return None


def object_to_parts(block: nn.Module, parts: tuple[Part, ...]) -> str | None:
    """Returns as `changed_part`, and which part's forward is another than those known. Asked once."""
    if (change := changed_part(block, parts)) is not None:
        return change
    for part in parts:
        cls = type(part.of(block))
        for kind in part.kinds:
            if kind.class_path == class_path(cls) and kind.known_forwards is not None:
                other = difference(cls, "forward", kind.known_forwards)
                if other is not None:
                    return f"the forward of {part.path} {other}"
    return None
