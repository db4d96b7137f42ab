"""Copies by words are the copies that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.parallel import words
from lightning_videoscale.parallel.ulysses import assign_heads, pack, unpack
from lightning_videoscale.parallel.words import by_words, copy_by_words


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_LEAST_BYTES", 0)
        yield


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.transpose(0, 1) for x in tensors], 2)


@given(st.sampled_from(DTYPES), st.integers(1, 3), *(st.integers(1, 40) for _ in range(3)), st.integers(0, 9))
def test_any_layout(dtype: torch.dtype, count: int, rows: int, columns: int, width: int, start: int) -> None:
    whole = [torch.randn(rows, columns, start + width + 1).to(dtype) for _ in range(count)]
    tensors = [x[..., start : start + width] for x in whole]
    copied = by_words(joined, tensors)
    assert copied.dtype is dtype
    assert torch.equal(copied, joined(tensors))


@pytest.mark.parametrize(("width", "seen_as"), [(16, torch.complex128), (12, torch.bfloat16)])
def test_whole_words(width: int, seen_as: torch.dtype) -> None:
    seen = []
    by_words(lambda tensors: seen.extend(tensors) or tensors[0].clone(), [torch.randn(2, width).bfloat16()])
    assert seen[0].dtype is seen_as


def test_a_copy_into_memory_that_is_there() -> None:
    whole, part = torch.zeros(3, 5, 24, dtype=torch.bfloat16), torch.randn(5, 3, 40).bfloat16()[..., 8:32]
    copy_by_words(whole, part.transpose(0, 1))
    assert torch.equal(whole, part.transpose(0, 1))


def test_every_bit_is_kept() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(16, 16, -1)
    copied = by_words(joined, [numbers])
    assert torch.equal(copied.view(torch.int16), joined([numbers.view(torch.int16)]))


def test_memory_between_words_is_left_as_it_is() -> None:
    shifted = torch.frombuffer(bytearray(4 * 65), dtype=torch.float32)[1:].view(2, 4, 8)
    shifted.copy_(torch.randn(2, 4, 8))
    assert torch.equal(by_words(joined, [shifted]), joined([shifted]))


def test_dtypes_that_differ_are_promoted() -> None:
    tensors = [torch.randn(2, 4, 16), torch.randn(2, 4, 16).double()]
    assert torch.equal(by_words(joined, tensors), joined(tensors))
    assert by_words(joined, tensors).dtype is torch.float64


def test_a_gradient_that_is_wanted() -> None:
    x = torch.randn(2, 4, 16, requires_grad=True)
    by_words(joined, [x]).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with torch.no_grad():
        assert not by_words(joined, [x]).requires_grad


def test_memory_that_is_not_there() -> None:
    with torch.device("meta"):
        assert by_words(joined, [torch.empty(2, 4, 16)]).shape == (4, 2, 16)


@given(*(st.integers(1, 3) for _ in range(4)), st.sampled_from([4, 8, 12]), st.booleans())
def test_heads_that_are_sent(batch: int, tokens: int, ranks: int, heads: int, dim: int, heads_first: bool) -> None:
    shares = assign_heads(0, (tokens,) * ranks, (tokens,) * ranks, ranks * heads, ranks * heads).qkv
    assert shares is not None
    shape = (batch, ranks * heads, tokens, dim) if heads_first else (batch, tokens, ranks * heads, dim)
    tensors = [torch.randn(shape) for _ in range(3)]
    tensors = [x.transpose(1, 2) if heads_first else x for x in tensors]
    message = pack(tensors, shares)
    of_ranks = torch.stack([x.unflatten(2, (ranks, heads)).permute(2, 1, 0, 3, 4) for x in tensors], 3)
    assert torch.equal(message, of_ranks.flatten())
    assert all(map(torch.equal, unpack(message, batch, dim, shares), tensors))


def test_little_is_not_seen_as_words() -> None:
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_LEAST_BYTES", 2**20)
        for rows in (2**14 - 1, 2**14):
            by_words(lambda tensors: seen.extend(tensors) or tensors[0].clone(), [torch.zeros(rows, 16)])
    assert [x.dtype for x in seen] == [torch.float32, torch.complex128]
