"""Full passes of Python's garbage collector, in which other ranks wait: `ShortCollections`."""

from __future__ import annotations

import gc


class ShortCollections:
    """Lets full passes of the garbage collector look only at what was made lately.

    Every now and then Python looks at all objects that there are: with torch, Lightning and diffusers loaded for a
    quarter of a second, and on each rank at another time. What `renew` finds is not looked at again.

    It is freed as ever once nothing refers to it. Only what is part of a cycle stays until the next `renew` or `end`.
    Nothing changes where the collector is off, or where somebody else has called ``gc.freeze``.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def renew(self) -> None:
        """Collects all garbage, and leaves out what remains from now on."""
        self.end()
        if gc.isenabled() and gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def end(self) -> None:
        """Lets the collector look at everything again."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
