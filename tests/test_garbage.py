"""Full passes of the garbage collector, which look only at what is new."""

from __future__ import annotations

import gc
import weakref

import pytest

from lightning_videoscale.garbage import ShortCollections

pytestmark = pytest.mark.usefixtures("collector")


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_what_is_new_is_collected_and_what_was_there_is_not_looked_at() -> None:
    collections, old = ShortCollections(), Cycle()
    collections.renew()
    assert gc.get_freeze_count() > 10_000
    new, gone = weakref.ref(Cycle()), weakref.ref(old)
    del old
    gc.collect()
    assert new() is None and gone() is not None
    collections.renew()
    assert gone() is None and gc.get_freeze_count() > 10_000
    collections.end()
    assert gc.get_freeze_count() == 0


def test_a_user_who_freezes_or_switches_off_is_left_alone() -> None:
    collections = ShortCollections()
    gc.freeze()
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    collections.renew()
    collections.end()
    # Some of the frozen may have gone meanwhile, and none of what was made is among them.
    assert before - len(made) < gc.get_freeze_count() <= before
    gc.unfreeze()
    gc.disable()
    try:
        collections.renew()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
