"""What ranks that share a sequence tell each other of their graphs, so that all capture or none.

`Readiness`         whether a rank can run a kind of calls by graphs
`capture_together`  captures on all of them
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


def capture_together(attempt: Callable[[], object], gather: Callable[[Any], list[Any]]) -> str | None:
    """Captures on all ranks or on none; collective over those that gather.

    Returns:
        Why none shall replay, the same on all ranks; None if all can.
    """
    reason = None
    try:
        attempt()
    except Exception as error:  # whatever it is, the eager pass that follows meets it again, or it is the capture's own
        reason = f"its capture failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return next((found for found in gather(reason) if found is not None), None)
