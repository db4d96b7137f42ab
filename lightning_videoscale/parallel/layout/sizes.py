"""What a user names of ``ulysses_size``, ``ring_size`` and ``sp_size``, and what follows from it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Size = int | Literal["auto"] | None
"""A size by number; ``"auto"`` or None (left out): whatever the others leave open."""

SizeOfGroup = int | Literal["auto"] | None
"""Ranks of a sequence-parallel group: by number; None: the usual; ``"auto"``: by the memory of the longest clip."""


class SequenceSizes(NamedTuple):
    """What is known before any model is.

    Attributes:
        sp: Ranks that share a sequence.
        ulysses: Those of them that trade slices for heads; None: to be chosen.
    """

    sp: int
    ulysses: int | None


def resolve_sizes(ulysses_size: Size, ring_size: Size, sp_size: int | None, usual: int | None = None) -> SequenceSizes:
    """Returns the sizes that follow from those that are named.

    Where only ``ulysses_size`` is named, the group is a Ulysses group. Where only ``ring_size`` is, or
    ``ring_size="auto"`` asks for a ring, the other size follows from that of the group. Where neither is, the division
    is open.

    Args:
        ulysses_size: As the user named it.
        ring_size: Likewise.
        sp_size: Likewise.
        usual: The group's size where nothing tells it, such as the devices of a node.

    Raises:
        ValueError: If a size is less than 1, they contradict each other, or nothing tells the group's size.
    """
    named = {"ulysses_size": ulysses_size, "ring_size": ring_size, "sp_size": sp_size}
    if any(isinstance(size, int) and size < 1 for size in named.values()):
        raise ValueError(f"{_listed(named)} must all be at least 1.")
    if any(isinstance(size, str) and size != "auto" for size in named.values()):
        raise ValueError(f"{_listed(named)} must be numbers, or 'auto'.")
    group = sp_size if sp_size is not None else usual
    if isinstance(ulysses_size, int):
        if ring_size is None and sp_size is None:
            return SequenceSizes(ulysses_size, ulysses_size)
        if isinstance(ring_size, int):
            group = sp_size if sp_size is not None else ulysses_size * ring_size
            if ulysses_size * ring_size != group:
                raise ValueError(f"{_listed(named)}: ulysses_size * ring_size must be sp_size. Leave one of them out.")
            return SequenceSizes(group, ulysses_size)
    if group is None:
        raise ValueError(
            f"Nothing tells how many ranks share a sequence: set ulysses_size or sp_size ({_listed(named)})."
        )
    known, name = (ulysses_size, "ulysses_size") if isinstance(ulysses_size, int) else (ring_size, "ring_size")
    if not isinstance(known, int):
        return SequenceSizes(group, 1 if group == 1 else None)
    if group % known:
        of = "ranks of sp_size" if sp_size is not None else "devices of a node"
        raise ValueError(
            f"{name}={known} does not divide the {group} {of}: choose another {name}, or set ulysses_size and "
            "ring_size."
        )
    return SequenceSizes(group, known if name == "ulysses_size" else group // known)


def _listed(named: dict[str, Size]) -> str:
    return ", ".join(f"{name}={size!r}" for name, size in named.items() if size is not None) or "all left out"
