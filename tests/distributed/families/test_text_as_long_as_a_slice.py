"""Fused queries and keys of text that is as long as a slice of the video are not taken for the video's."""

from __future__ import annotations

import pytest

from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import Ranks, check


@pytest.mark.parametrize("family", ["ltx", "kandinsky"])
def test_text_as_long_as_a_slice(ranks: Ranks, family: str) -> None:
    check(ranks, [Case(family, (1, 1, 2), {"text": 8, "frames": 1, "side": 4}, fused=True)])
