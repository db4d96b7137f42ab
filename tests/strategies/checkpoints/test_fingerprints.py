"""Fingerprints of tensors, against whole numbers of Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_videoscale.strategies.checkpoints.fingerprints import Fingerprint

CPU = torch.device("cpu")
WORDS_OF_A_ROW = 1 << 14


def odd_number(place: int) -> int:
    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    mixed = signed((place + 1) * -7046029254386353131)
    mixed = signed((mixed ^ (mixed >> 30)) * -4658895280553007687)
    return (mixed ^ (mixed >> 27)) | 1


def expected(x: Tensor) -> int:
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8").tolist()
    return (
        sum(
            word * odd_number(place % WORDS_OF_A_ROW) * odd_number(place // WORDS_OF_A_ROW)
            for place, word in enumerate(words)
        )
        % 2**64
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("elements", [0, 1, 3, 70_001])
def test_it_is_the_sum_of_weighted_words(dtype: torch.dtype, elements: int) -> None:
    # 70 001 elements are some rows of words, and of eight bytes each more than a CPU takes at a time.
    x = (torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 50).to(dtype)
    found = Fingerprint.of(x, CPU)
    assert found.bits == expected(x)
    assert found.rounded == (expected(x.bfloat16()) if dtype.is_floating_point else None)
    assert Fingerprint.from_dict(found.to_dict()) == found


def test_what_differs_is_told() -> None:
    x = torch.randn(33, 1007, generator=torch.Generator().manual_seed(0))
    found = Fingerprint.of(x, CPU)
    for change in ((0, 0), (17, 500), (32, 1006)):
        other = x.clone()
        other[change] = torch.nextafter(other[change], torch.tensor(9.0))
        assert Fingerprint.of(other, CPU).difference(found) == "has other values"
    swapped = x.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert Fingerprint.of(swapped, CPU).difference(found) == "has other values"
    assert Fingerprint.of(x.T, CPU).difference(found) == "has shape [1007, 33] and had [33, 1007]"
    assert Fingerprint.of(x.T.contiguous().T, CPU).difference(found) is None
    assert Fingerprint.of(torch.zeros(3), CPU) != Fingerprint.of(torch.zeros(4), CPU)
    assert Fingerprint.of(torch.zeros(3), CPU).difference(Fingerprint.of(-torch.zeros(3), CPU)) is not None


def test_dtypes_are_compared_where_both_hold_the_values_in_bfloat16() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wide, narrow = Fingerprint.of(x, CPU), Fingerprint.of(x.bfloat16(), CPU)
    assert narrow.difference(wide) is None and wide.difference(narrow) is None
    other = str(Fingerprint.of((x * 1.1).bfloat16(), CPU).difference(wide))
    assert "torch.bfloat16" in other and "torch.float32" in other
    assert Fingerprint.of(x.to(torch.uint8), CPU).difference(wide) is not None
