"""Full passes of Python's garbage collector, in which other ranks wait: `ShortCollections`."""

from __future__ import annotations

import gc


class ShortCollections:
    """Lets full passes of the garbage collector look only at what was made lately.

    Every now and then Python looks at all objects that there are: with torch, Lightning and diffusers loaded for a
    quarter of a second, and on each rank at another time. What `renew` finds is not looked at again.

    It is freed as ever once nothing refers to it. Only what is part of a cycle stays until the next `renew` or `end`.
    Nothing changes where the collector is off, or where somebody else had called ``gc.freeze`` before.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._is_somebody_elses = False

    def renew(self) -> None:
        """Collects all garbage, and leaves out what remains from now on."""
        self.end()
        if self._is_somebody_elses or not gc.isenabled():
            return
        # Asked for once where it is not zero: Python walks over all that is frozen to count it.
        self._is_somebody_elses = gc.get_freeze_count() > 0
        if not self._is_somebody_elses:
            gc.collect()
            gc.freeze()
            self._is_ours = True

    def end(self) -> None:
        """Lets the collector look at everything again."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False
