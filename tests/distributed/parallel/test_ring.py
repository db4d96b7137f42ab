"""Attention on four ranks is dense attention: every factorisation, any length, any heads, any mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.compat.torch.versions import ring_attention_is_traced
from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, sequence_parallel_attention, split_sizes
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]

# (ring, ulysses) on four ranks; dp is what is left.
SIZES = [(1, 4), (2, 2), (4, 1), (2, 1), (1, 2), (1, 1)]

needs_traced_ring = pytest.mark.skipif(
    not ring_attention_is_traced(), reason="before torch 2.13 ring attention is outside of compiled code"
)


class Case(NamedTuple):
    seed: int
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    masked: bool


mesh_of = cache(lambda ring, ulysses: SequenceMesh.create("cpu", ring_size=ring, ulysses_size=ulysses))


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As the formula says, of (B, S, H, D); samples of which no key may be attended have zeros."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if mask is None:
        return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)
    visible = mask[:, None, None]
    weights = (logits.masked_fill(~visible, -1e300)).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def whole_problem(case: Case, seed: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Query, key and value; the output's cotangent; the key mask."""
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        return torch.randn(case.batch, case.length, heads, case.dim, generator=generator, dtype=torch.float64)

    tensors = [random(heads).requires_grad_() for heads in (case.heads, case.kv_heads, case.kv_heads)]
    mask = torch.rand(case.batch, case.length, generator=generator) < 0.5 if case.masked else None
    if mask is not None and case.batch == 3:
        mask[1] = torch.arange(case.length) == 0  # no key on any rank but the first
        mask[2] = False  # none at all
    return tensors, random(case.heads), mask


def channels_first(x: Tensor) -> Tensor:
    """(B, S, H, D) that lies in memory as (B, H, D, S), as behind a convolution."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def errors(ring: int, ulysses: int, case: Case, recompute: bool = False, laid: Sequence[int] = ()) -> list[float]:
    """Relative errors of output and gradients, of every dp rank's own problem; those ``laid`` are `channels_first`."""
    mesh = mesh_of(ring, ulysses)
    tensors, cotangent, mask = whole_problem(case, 1000 * case.seed + mesh.dp.rank)
    expected = dense(*tensors, mask)
    expected_gradients = torch.autograd.grad(expected, tensors, cotangent)

    lengths = split_sizes(case.length, mesh.sp.size)
    mine = slice(sum(lengths[: mesh.sp.rank]), sum(lengths[: mesh.sp.rank + 1]))
    slices = [x.detach()[:, mine].clone() for x in tensors]
    local = [(channels_first(x) if i in laid else x).requires_grad_() for i, x in enumerate(slices)]
    local_mask = mask[:, mine] if mask is not None else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sequence_parallel_attention(q, k, v, mesh, lengths=lengths, key_mask=local_mask)

    out = checkpoint(attention, *local, use_reentrant=False) if recompute else attention(*local)
    gradients = torch.autograd.grad(out, local, cotangent[:, mine])
    # Against the norm of the whole: a slice of it may be all but zero.
    return [
        float((got - whole[:, mine]).norm() / max(float(whole.detach().norm()), float(cotangent.norm())))
        for got, whole in zip((out, *gradients), (expected, *expected_gradients), strict=True)
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 5))
    group = draw(st.integers(-(-4 // kv_heads), 5))  # at least four query heads, for four Ulysses ranks
    return Case(
        seed=draw(st.integers(0, 99)),
        batch=draw(st.sampled_from([1, 3])),
        length=draw(st.integers(4, 23)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 8, 12])),
        masked=draw(st.booleans()),
    )


@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_any_shape_on_any_mesh_is_dense_attention(
    ranks: Ranks, ring: int, ulysses: int, case: Case, recompute: bool
) -> None:
    assert max(map(max, ranks(4).run(errors, ring, ulysses, case, recompute))) <= 1e-12


NAMED = {
    "even": Case(0, 1, 16, 4, 4, 8, False),
    "odd": Case(0, 3, 19, 7, 7, 12, False),
    "a_token_per_rank": Case(0, 3, 4, 4, 4, 8, True),
    "one_kv_head": Case(0, 1, 11, 9, 1, 8, True),
    "kv_head_of_two_ranks": Case(0, 3, 18, 6, 3, 8, False),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
def test_named_shapes_are_dense_attention(ranks: Ranks, ring: int, ulysses: int, name: str) -> None:
    assert max(map(max, ranks(4).run(errors, ring, ulysses, NAMED[name]))) <= 1e-12


@pytest.mark.parametrize("laid", [(0,), (1, 2), (0, 1, 2)])
def test_tensors_may_lie_channels_first(ranks: Ranks, laid: tuple[int, ...]) -> None:
    assert max(map(max, ranks(4).run(errors, 4, 1, NAMED["odd"], False, laid))) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
def test_the_whole_product_of_shapes(ranks: Ranks, ring: int, ulysses: int) -> None:
    pool = ranks(4)
    heads = [(4, 4), (5, 5), (8, 2), (6, 3), (10, 1), (7, 7)]
    for batch, length, (query, kv), masked, again in itertools.product(
        (1, 3), (4, 7, 16, 30, 33), heads, (False, True), (False, True)
    ):
        case = Case(1, batch, length, query, kv, 8, masked)
        worst = max(map(max, pool.run(errors, ring, ulysses, case, again)))
        assert worst <= 1e-12, (case, again)


# -- half precision ------------------------------------------------------------------------------------------------


def bfloat16_errors(ring: int) -> tuple[list[float], list[float]]:
    """Errors against float64 of a ring and of one rank, both in bfloat16, of this rank's rows."""
    mesh = mesh_of(ring, 1)
    tensors, cotangent, _ = whole_problem(Case(0, 2, 256, 4, 4, 16, False), 5)
    tensors = [x.detach().bfloat16().double().requires_grad_() for x in tensors]
    cotangent = cotangent.bfloat16()
    expected = dense(*tensors, None)
    exact = (expected, *torch.autograd.grad(expected, tensors, cotangent.double()))
    mine = slice(256 // ring * mesh.sp.rank, 256 // ring * (mesh.sp.rank + 1))

    def errors_of(got: tuple[Tensor, ...], rows: slice) -> list[float]:
        pairs = zip(got, exact, strict=True)
        return [float((g[:, rows].double() - e[:, mine]).norm() / e[:, mine].norm()) for g, e in pairs]

    whole = [x.detach().bfloat16().requires_grad_() for x in tensors]
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)
    alone = errors_of((out, *torch.autograd.grad(out, whole, cotangent)), mine)
    local = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    out = sequence_parallel_attention(local[0], local[1], local[2], mesh)
    return errors_of((out, *torch.autograd.grad(out, local, cotangent[:, mine])), slice(None)), alone


@pytest.mark.parametrize("ring", [2, 4])
def test_a_ring_rounds_little_more_than_one_rank(ranks: Ranks, ring: int) -> None:
    for got, alone in ranks(4).run(bfloat16_errors, ring):
        for error, error_alone in zip(got, alone, strict=True):
            assert error <= 1.5 * error_alone <= 1.5e-2


# -- what is sent, and what is kept --------------------------------------------------------------------------------


def messages_and_memory() -> tuple[list[tuple[int, ...]], int]:
    """Sizes of all messages (0 aside) of a forward and backward pass, and the elements kept between them."""
    mesh, sent, saved = mesh_of(4, 1), [], {}

    class Counting(CollectiveTransport):
        def all_to_all(self, message: Tensor, send: Any, receive: Any, axis: Any) -> Tensor:
            sent.append((sum(map(bool, send)), sum(send)))
            return super().all_to_all(message, send, receive, axis)

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.numel()
        return x

    q, k, v = (torch.randn(1, 5, 6, 8, requires_grad=True) for _ in range(3))
    k, v = (x[:, :, :2].detach().requires_grad_() for x in (k, v))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = sequence_parallel_attention(q, k, v, mesh, transport=Counting())
    out.sum().backward()
    return sent, sum(saved.values())


def test_only_key_value_heads_travel_and_little_is_kept(ranks: Ranks) -> None:
    block = 2 * 5 * 2 * 8
    for sent, saved in ranks(4).run(messages_and_memory):
        # Forward passes three blocks on; backward three blocks and four gradients. Each goes to one neighbour.
        assert sent == [(1, block)] * 10
        assert saved == 2 * 5 * 6 * 8 + block + 5 * 6  # q and out, k and v, log-sum-exp


def missing_neighbour() -> str:
    mesh = SequenceMesh.create("cpu", ring_size=4, ulysses_size=1, timeout=timedelta(seconds=2))
    if dist.get_rank() == 3:
        return "stayed away"
    q = torch.ones(1, 2, 1, 8)
    try:
        sequence_parallel_attention(q, q, q, mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_an_error_and_no_hang(ranks: Ranks) -> None:
    messages = ranks(4).run(missing_neighbour)
    assert messages[3] == "stayed away"
    assert all("Timed out" in message or "Connection closed" in message for message in messages[:3]), messages
