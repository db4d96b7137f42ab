"""What ranks that share a sequence tell each other of their graphs, so that all capture or none.

`Readiness`         whether a rank can run a kind of calls by graphs
`Captured`          whether it has captured them, and what that takes
`capture_together`  captures on all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Readiness(NamedTuple):
    """What a rank tells its peers of a kind of calls.

    Attributes:
        is_ready: Whether it has captured one, or can.
        objection: Why they stay eager there.
        dropped: Why it has dropped graphs since it was last asked; "" if it has not.
    """

    is_ready: bool
    objection: str | None
    dropped: str


class Captured(NamedTuple):
    """What a rank tells its peers once it has captured a kind of calls, or could not.

    Attributes:
        failure: Why it could not; None if it could.
        excess: What its graphs take, if that is more than they may; else None.
        has_paid: Whether its graphs were replayed often enough to be captured anew.
    """

    failure: str | None
    excess: str | None = None
    has_paid: bool = False


def capture_together(attempt: Callable[[], Captured], gather: Callable[[Any], list[Any]]) -> list[Captured]:
    """Captures on a rank, and returns what all ranks tell of it; collective over those that gather."""
    try:
        mine = attempt()
    except Exception as error:  # whatever it is, the eager pass that follows meets it again, or it is the capture's own
        mine = Captured(f"its capture failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return gather(mine)
