"""Attention over a sequence that is split over ranks: exact, in few messages, in one graph, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_videoscale.parallel import (
    SequenceMesh,
    sequence_parallel_attention,
    split_sizes,
)
from tests.distributed.parallel.test_ring import needs_traced_ring
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def attention_errors(seed: int, batch: int, length: int, heads: int, dim: int) -> list[float]:
    """Relative errors of output and gradients against dense attention over the whole sequence."""
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    generator = torch.Generator().manual_seed(seed)
    q, k, v, cotangent = (torch.randn(batch, length, heads, dim, generator=generator).double() for _ in range(4))
    dense_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in dense_inputs)).transpose(1, 2)
    dense_gradients = torch.autograd.grad(dense, dense_inputs, cotangent)

    lengths = split_sizes(length, mesh.sp.size)
    mine = slice(sum(lengths[: mesh.sp.rank]), sum(lengths[: mesh.sp.rank + 1]))
    inputs = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
    out = sequence_parallel_attention(inputs[0], inputs[1], inputs[2], mesh, lengths=[*lengths])
    gradients = torch.autograd.grad(out, inputs, cotangent[:, mine])
    pairs = [(out, dense[:, mine]), *zip(gradients, (g[:, mine] for g in dense_gradients), strict=True)]
    return [float((got - expected).norm() / expected.norm()) for got, expected in pairs]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(4, 23), st.integers(4, 9), st.sampled_from([1, 8, 12]))
def test_attention_over_a_split_sequence_is_dense_attention(
    ranks: Ranks, seed: int, batch: int, length: int, heads: int, dim: int
) -> None:
    for errors in ranks(4).run(attention_errors, seed, batch, length, heads, dim):
        assert max(errors) <= 1e-12


def messages_and_copies(heads: int, batch: int) -> tuple[int, float]:
    """Messages of a layer in forward and backward, and what else it writes, attention aside, in sizes of its query."""
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    q, k, v = (torch.randn(batch, 3, heads, 8, requires_grad=True) for _ in range(3))
    cotangent = torch.ones_like(q)
    messages, written = 0, 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal messages, written
            result = op(*args, **(kwargs or {}))
            messages += op.namespace == "c10d"
            if op.namespace == "aten" and not any(name in op.name() for name in ("dot_product", "empty")):
                taken = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
                made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
                written += sum(x.nbytes for x in made if x.untyped_storage().data_ptr() not in taken)
            return result

    with Counting():
        out = sequence_parallel_attention(q, k, v, mesh)
        torch.autograd.grad(out, (q, k, v), cotangent)
    return messages, written / q.nbytes


@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_sends_four_messages_and_copies_little(ranks: Ranks, batch: int) -> None:
    for messages, written in ranks(4).run(messages_and_copies, 8, batch):
        assert messages == 4  # of query, key and value in one, of the output, and of their gradients
        # Packed: query, key, value, the output's gradient. Joined: three gradients. Put in place: output and gradients.
        assert written <= 4 + 3 + 4


def compiled_errors(ring: int, ulysses: int, lengths: tuple[int, ...], heads: int, kv_heads: int) -> list[float]:
    """Differences between a layer that is one graph and the eager one, of output and gradients."""
    mesh = SequenceMesh.create("cpu", ring_size=ring, ulysses_size=ulysses)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sequence_parallel_attention(q, k, v, mesh, lengths=lengths)

    tensors = [
        torch.randn(2, lengths[mesh.sp.rank], n, 8).double().requires_grad_() for n in (heads, kv_heads, kv_heads)
    ]
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    return [float((got - expected).abs().max()) for expected, got in zip(*results, strict=True)]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=needs_traced_ring)])
def test_a_layer_compiles_to_one_graph(ranks: Ranks, ring: int, ulysses: int) -> None:
    problem = (
        ((3, 3), 4, 4) if ulysses > 1 else ((4, 3), 5, 1)
    )  # the other ones in tests/distributed/parallel/test_cross_lengths.py
    assert max(map(max, ranks(2).run(compiled_errors, ring, ulysses, *problem))) <= 1e-12


def attention_messages() -> list[str]:
    def message(
        *shapes: tuple[int, ...],
        lengths: tuple[int, ...] | None = None,
        mask: Tensor | None = None,
        whole_mask: Tensor | None = None,
        mesh: SequenceMesh,
    ) -> str:
        tensors = [torch.randn(shape) for shape in shapes]
        try:
            sequence_parallel_attention(*tensors, mesh=mesh, lengths=lengths, key_mask=mask, whole_key_mask=whole_mask)
        except ValueError as error:
            return str(error)
        return "no error"

    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    q, own = (1, 2, 4, 8), torch.ones(1, 2, dtype=torch.bool)
    return [
        message((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), mesh=mesh),
        message(q, q, (1, 2, 4, 16), mesh=mesh),
        message(q, q, q, lengths=(3, 3, 3, 3), mesh=mesh),
        message(q, q, q, lengths=(2, 2), mesh=mesh),
        message(q, (1, 2, 3, 8), (1, 2, 3, 8), mesh=mesh),
        message(q, q, q, mask=torch.ones(1, 8, dtype=torch.bool), mesh=mesh),
        message(q, q, q, mask=torch.ones(1, 2), mesh=mesh),
        message(q, q, q, whole_mask=torch.ones(1, 1, dtype=torch.bool), mesh=mesh),  # which would be broadcast
        message(q, q, q, mask=own, whole_mask=own.repeat(1, 4), mesh=mesh),
    ]


def test_attention_says_what_does_not_fit(ranks: Ranks) -> None:
    heads, shapes, lengths, too_few, groups, mask, mask_dtype, whole, both = ranks(4).run(attention_messages)[0]
    assert "3 heads" in heads and "ulysses_size=4" in heads
    assert "got (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 16)" in shapes
    assert "rank 0 of 4" in lengths and "2 tokens" in lengths and "lengths=(3, 3, 3, 3)" in lengths
    assert "lengths=(2, 2)" in too_few
    assert "got (1, 2, 4, 8), (1, 2, 3, 8), (1, 2, 3, 8)" in groups
    assert "(B, t) = (1, 2)" in mask and "got torch.bool of (1, 8)" in mask
    assert "got torch.float32 of (1, 2)" in mask_dtype
    assert "= (1, 8)" in whole and "got torch.bool of (1, 1)" in whole
    assert "give one of them" in both
