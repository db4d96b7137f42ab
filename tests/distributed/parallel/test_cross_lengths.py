"""Attention between two split sequences, such as video and audio, is dense attention between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.parallel import SequenceMesh, sequence_parallel_attention, split_sizes
from tests.distributed.parallel.test_ring import dense, needs_traced_ring
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

MESHES = [(1, 4), (2, 2), (4, 1)]
"""(ring, ulysses) on four ranks."""

mesh_of = cache(lambda ring, ulysses: SequenceMesh.create("cpu", ring_size=ring, ulysses_size=ulysses))


class Case(NamedTuple):
    seed: int
    batch: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    masked: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 5))
    groups = draw(st.integers(-(-4 // kv_heads), 5))
    shares = st.tuples(*[st.integers(1, 7)] * 4)  # of a stream; those of two streams together are not even
    return Case(
        seed=draw(st.integers(0, 99)),
        batch=draw(st.integers(1, 3)),
        queries=draw(shares),
        keys=draw(shares),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 8, 12])),
        masked=draw(st.booleans()),
    )


def errors(ring: int, ulysses: int, case: Case) -> list[float]:
    """Of the output and of the gradients of query, key and value on this rank; relative where that is not 0."""
    mesh, rank = mesh_of(ring, ulysses), dist.get_rank()
    generator = torch.Generator().manual_seed(case.seed)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(case.batch, tokens, heads, case.dim, generator=generator, dtype=torch.float64)

    queries, keys = sum(case.queries), sum(case.keys)
    whole = [
        random(tokens, heads).requires_grad_()
        for tokens, heads in ((queries, case.heads), (keys, case.kv_heads), (keys, case.kv_heads))
    ]
    cotangent = random(queries, case.heads)
    mask = torch.rand(case.batch, keys, generator=generator) < 0.5 if case.masked else None
    out = dense(*whole, mask)
    expected = [out, *torch.autograd.grad(out, whole, cotangent)]

    my_queries, my_keys = (
        slice(sum(lengths[:rank]), sum(lengths[: rank + 1])) for lengths in (case.queries, case.keys)
    )
    rows = [my_queries, my_keys, my_keys]
    local = [x.detach()[:, mine].clone().requires_grad_() for x, mine in zip(whole, rows, strict=True)]
    out = sequence_parallel_attention(
        local[0],
        local[1],
        local[2],
        mesh,
        lengths=case.queries,
        key_lengths=case.keys,
        key_mask=mask[:, my_keys].contiguous() if mask is not None else None,
    )
    got = [out, *torch.autograd.grad(out, local, cotangent[:, my_queries])]
    pairs = zip(got, expected, [my_queries, *rows], strict=True)
    return [float((x - y[:, mine]).norm() / max(float(y[:, mine].norm()), 1e-3)) for x, y, mine in pairs]


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_any_two_lengths_on_any_mesh_are_dense_attention(ranks: Ranks, ring: int, ulysses: int, case: Case) -> None:
    assert max(map(max, ranks(4).run(errors, ring, ulysses, case))) <= 1e-12


NAMED = {
    "a_key_per_rank": Case(0, 3, split_sizes(27, 4), (1, 1, 1, 1), 4, 4, 8, False),
    "a_query_per_rank": Case(0, 1, (1, 1, 1, 1), split_sizes(27, 4), 5, 1, 8, True),
    "equal_lengths": Case(0, 3, split_sizes(18, 4), split_sizes(18, 4), 6, 3, 12, True),
    "equal_sums": Case(0, 2, (5, 1, 4, 2), (2, 4, 1, 5), 7, 7, 8, True),
    "equal_here_only": Case(0, 2, (3, 3, 2, 2), (3, 3, 3, 2), 8, 2, 8, False),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_named_lengths_are_dense_attention(ranks: Ranks, ring: int, ulysses: int, name: str) -> None:
    assert max(map(max, ranks(4).run(errors, ring, ulysses, NAMED[name]))) <= 1e-12


def compiled_errors(ring: int, ulysses: int, case: Case) -> list[float]:
    """Differences between a layer that is one graph and the eager one, of outputs and gradients."""
    mesh, rank = mesh_of(ring, ulysses), dist.get_rank()

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sequence_parallel_attention(q, k, v, mesh, lengths=case.queries, key_lengths=case.keys, key_mask=mask)

    shapes = [(case.queries, case.heads), (case.keys, case.kv_heads), (case.keys, case.kv_heads)]
    tensors = [
        torch.randn(case.batch, lengths[rank], heads, case.dim).double().requires_grad_() for lengths, heads in shapes
    ]
    mask = torch.rand(case.batch, case.keys[rank]) < 0.5 if case.masked else None
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        with torch.no_grad():
            alone = function(*tensors, mask)
        out = function(*tensors, mask)
        results.append([alone, out, *torch.autograd.grad(out.square().sum(), tensors)])
    return [float((got - expected).abs().max()) for expected, got in zip(*results, strict=True)]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=[needs_traced_ring, pytest.mark.full])])
def test_a_layer_between_two_sequences_compiles_to_one_graph(ranks: Ranks, ring: int, ulysses: int) -> None:
    case = Case(0, 2, (4, 3), (1, 2), 5, 1, 8, False) if ulysses > 1 else Case(0, 2, (3, 3), (2, 2), 4, 4, 8, True)
    assert max(map(max, ranks(2).run(compiled_errors, ring, ulysses, case))) <= 1e-12


def messages() -> list[str]:
    mesh, said = mesh_of(1, 4), []
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 3, 4, 8)
    arguments: list[dict[str, Any]] = [
        {"lengths": (2, 2, 2, 2)},
        {"lengths": (2, 2, 2, 2), "key_lengths": (2, 2, 2, 2)},
        {"lengths": (2, 2, 2, 2), "key_lengths": (3, 3, 3)},
        {"lengths": (2, 2, 2, 2), "key_lengths": (3, 3, 3, 3), "key_mask": torch.ones(1, 2, dtype=torch.bool)},
    ]
    for given_ones in arguments:
        try:
            sequence_parallel_attention(q, k, k, mesh, **given_ones)
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return said


def test_lengths_that_do_not_fit_the_keys_are_named(ranks: Ranks) -> None:
    forgotten, other, too_few, mask = ranks(4).run(messages)[0]
    assert "its key has 3 tokens, but lengths=(2, 2, 2, 2)" in forgotten
    assert "its key has 3 tokens, but key_lengths=(2, 2, 2, 2)" in other
    assert "key_lengths=(3, 3, 3)" in too_few
    assert "(B, t) = (1, 3)" in mask and "(1, 2)" in mask
