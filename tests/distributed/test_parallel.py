"""The parts of sequence parallelism on four ranks, in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.compat.torch.versions import ring_attention_is_traced
from lightning_videoscale.parallel import (
    CollectiveTransport,
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    gather,
    parallelize,
    sequence_parallel_attention,
    split,
    split_sizes,
)
from lightning_videoscale.parallel.layout import MACHINES, divide
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]
traces_ring = pytest.mark.skipif(not ring_attention_is_traced(), reason="this torch leaves ring attention uncompiled")


# -- the mesh ------------------------------------------------------------------------------------------------------


def places(ulysses_size: int, ring_size: int) -> tuple[Any, ...]:
    mesh = SequenceMesh.create("cpu", ulysses_size=ulysses_size, ring_size=ring_size)
    for axis in (mesh.dp, mesh.ring, mesh.ulysses, mesh.sp):
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        assert dist.get_rank(axis.group) == axis.rank
    assert mesh.device_mesh.mesh_dim_names == ("dp", "ring", "ulysses")
    return mesh.dp.ranks, mesh.ring.ranks, mesh.ulysses.ranks, mesh.sp.ranks, repr(mesh)


def test_ulysses_is_innermost_and_dp_outermost(ranks: Ranks) -> None:
    got = ranks(4).run(places, ulysses_size=2, ring_size=1)
    assert got[3] == ((1, 3), (3,), (2, 3), (2, 3), "SequenceMesh(dp=2, ring=1, ulysses=2)")
    got = ranks(4).run(places, ulysses_size=2, ring_size=2)
    assert got[3] == ((3,), (1, 3), (2, 3), (0, 1, 2, 3), "SequenceMesh(dp=1, ring=2, ulysses=2)")


# -- a mesh whose division is open ----------------------------------------------------------------------------------


def facts(mesh: SequenceMesh) -> list[tuple[Any, ...]]:
    """Ranks of each axis, and the sum of the ranks' numbers over it."""
    found = []
    for axis in (mesh.dp, mesh.ring, mesh.ulysses, mesh.sp):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=axis.group)
        found.append((axis.name, axis.ranks, axis.rank, total.item() == sum(axis.ranks)))
    return found


def divide_late() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with SequenceMesh.create("cpu", ulysses_size=2, ring_size=2) as named:
        found["named"] = facts(named)
    with SequenceMesh.create("cpu", sp_size=4) as mesh:
        found["open"] = mesh.device_mesh.mesh_dim_names, repr(mesh)
        with pytest.raises(RuntimeError, match="ulysses_size"):
            _ = mesh.ring
        with pytest.raises(ValueError, match="ulysses_size=3"):
            mesh.divide(3)
        mesh.divide(2)
        found["divided"] = facts(mesh)
        with pytest.raises(RuntimeError, match="divided already"):
            mesh.divide(2)
    with mesh:  # opened again
        found["again"], found["names"] = facts(mesh), mesh.device_mesh.mesh_dim_names
    return found


def test_a_mesh_may_be_divided_late(ranks: Ranks) -> None:
    for found in ranks(4).run(divide_late):
        assert found["open"] == (("dp", "sp"), "SequenceMesh(dp=1, sp=4)")
        assert found["named"] == found["divided"] == found["again"]
        assert all(agrees for *_, agrees in found["named"])
        assert found["names"] == ("dp", "ring", "ulysses")


def divide_as_rank_0_says() -> tuple[str, list[str], str]:
    """Rank 0 has GPUs on which three heads of long clips are better passed around; the others know nothing of that."""
    said: list[str] = []
    speeds = MACHINES["h200" if dist.get_rank() == 0 else "cpu"]
    with patch.object(divide, "machine_of", lambda name: speeds), SequenceMesh.create("cpu", sp_size=2) as mesh:
        parallelize(
            tiny_wan(num_attention_heads=3), mesh, tokens=2_000_000 if dist.get_rank() == 0 else 1, log=said.append
        )
        with SequenceMesh.create("cpu", sp_size=2) as other:
            parallelize(nn.Identity(), other, SplitPlan({}, {}, {}, lambda model, context: lambda: None))
            return repr(mesh), said, repr(other)


def test_all_ranks_divide_as_rank_0_says(ranks: Ranks) -> None:
    results = ranks(4).run(divide_as_rank_0_says)
    assert {mesh for mesh, _, _ in results} == {"SequenceMesh(dp=2, ring=2, ulysses=1)"}
    assert results[0][1][0].startswith("3 heads on 2 ranks: ulysses 1 x ring 2, predicted 1.")
    assert not any("heads" in line for _, said, _ in results[1:] for line in said)
    assert {own for *_, own in results} == {"SequenceMesh(dp=2, ring=1, ulysses=2)"}, "a function may know no ring"


# -- attention -----------------------------------------------------------------------------------------------------


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
    out = sequence_parallel_attention(inputs[0], inputs[1], inputs[2], mesh, lengths=lengths)
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
    torch._dynamo.reset()
    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    return [float((got - expected).abs().max()) for expected, got in zip(*results, strict=True)]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=traces_ring)])
def test_a_layer_compiles_to_one_graph(ranks: Ranks, ring: int, ulysses: int) -> None:
    problem = ((3, 3), 4, 4) if ulysses > 1 else ((4, 3), 5, 1)  # the other ones in test_cross_lengths.py
    assert max(map(max, ranks(2).run(compiled_errors, ring, ulysses, *problem))) <= 1e-12


def attention_messages() -> list[str]:
    def message(
        *shapes: tuple[int, ...],
        lengths: tuple[int, ...] | None = None,
        mask: Tensor | None = None,
        mesh: SequenceMesh,
    ) -> str:
        tensors = [torch.randn(shape) for shape in shapes]
        try:
            sequence_parallel_attention(*tensors, mesh=mesh, lengths=lengths, key_mask=mask)
        except ValueError as error:
            return str(error)
        return "no error"

    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    q = (1, 2, 4, 8)
    return [
        message((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), mesh=mesh),
        message(q, q, (1, 2, 4, 16), mesh=mesh),
        message(q, q, q, lengths=(3, 3, 3, 3), mesh=mesh),
        message(q, q, q, lengths=(2, 2), mesh=mesh),
        message(q, (1, 2, 3, 8), (1, 2, 3, 8), mesh=mesh),
        message(q, q, q, mask=torch.ones(1, 8, dtype=torch.bool), mesh=mesh),
        message(q, q, q, mask=torch.ones(1, 2), mesh=mesh),
    ]


def test_attention_says_what_does_not_fit(ranks: Ranks) -> None:
    heads, shapes, lengths, too_few, groups, mask, mask_dtype = ranks(4).run(attention_messages)[0]
    assert "3 heads" in heads and "ulysses_size=4" in heads
    assert "got (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 16)" in shapes
    assert "rank 0 of 4" in lengths and "2 tokens" in lengths and "lengths=(3, 3, 3, 3)" in lengths
    assert "lengths=(2, 2)" in too_few
    assert "got (1, 2, 4, 8), (1, 2, 3, 8), (1, 2, 3, 8)" in groups
    assert "(B, t) = (1, 2)" in mask and "got torch.bool of (1, 8)" in mask
    assert "got torch.float32 of (1, 2)" in mask_dtype


# -- the gradient rule ---------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Parameters before the split, inside the region, fed into it from outside, and after the gather."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inside, self.condition, self.after = (nn.Linear(6, 6).double() for _ in range(4))

    def forward(self, x: Tensor, condition: Tensor, context: SequenceContext | None) -> Tensor:
        x = torch.tanh(self.before(x))
        if context is not None:
            x = split(x, 1, context)
        x = torch.tanh(self.inside(x) + self.condition(condition)[:, None])
        if context is not None:
            x = gather(x, 1, context)
        return self.after(x).square().mean()


def gradient_rule_error(length: int) -> float:
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    context = SequenceContext(mesh, CollectiveTransport())
    torch.manual_seed(1)
    x, condition = torch.randn(2, length, 6).double(), torch.randn(2, 6).double()
    whole, sliced = Network(), Network()
    whole(x, condition, None).backward()
    sliced(x, condition, context).backward()
    errors = []
    for expected, got in zip(whole.parameters(), sliced.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        dist.all_reduce(got.grad)
        errors.append(float((got.grad / 4 - expected.grad).norm() / expected.grad.norm()))
    return max(errors)


@pytest.mark.parametrize("length", [4, 8, 11])
def test_averaged_gradients_are_those_of_one_device_wherever_the_parameter_is(ranks: Ranks, length: int) -> None:
    assert max(ranks(4).run(gradient_rule_error, length)) <= 1e-12


# -- whole models --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(2)
        if self.context is None:
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        else:
            lengths = self.context.lengths()
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return x + out.flatten(2)


class MyModel(nn.Module):
    """A user's own model, with activation checkpointing as users write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()
        self.head = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def my_plan() -> SplitPlan:
    """A plan written by hand."""

    def exchange(model: nn.Module, context: SequenceContext) -> Callable[[], None]:
        assert isinstance(model, MyModel)

        def set_context(value: SequenceContext | None) -> None:
            for block in model.blocks:
                block.context = value

        set_context(context)
        return lambda: set_context(None)

    return SplitPlan({"": {"x": Split(dim=1)}}, {}, {"head": {0: Split(1)}}, exchange)


def own_model_error() -> float:
    """Two forward passes whose slices have equal length here but not elsewhere, before one backward."""
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    whole, sliced = MyModel(), MyModel()
    undo = parallelize(sliced, mesh, my_plan())
    torch.manual_seed(1)
    inputs = [torch.randn(2, length, 8).double() for length in (9, 10, 11)]
    for model in (whole, sliced):
        torch.stack([model(x).square().mean() * weight for weight, x in enumerate(inputs, 1)]).sum().backward()
    worst = 0.0
    for expected, got in zip(whole.parameters(), sliced.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        dist.all_reduce(got.grad)
        worst = max(worst, float((got.grad / 4 - expected.grad).norm() / expected.grad.norm()))
    undo()
    assert torch.equal(sliced(inputs[0]), whole(inputs[0]))
    return worst


def test_recomputation_sees_the_split_of_its_own_forward_pass(ranks: Ranks) -> None:
    assert max(ranks(4).run(own_model_error)) <= 1e-12


def wan_messages() -> list[str]:
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    messages = []
    own_processor = tiny_wan()
    own_processor.blocks[0].attn1.set_processor(type("MyProcessor", (), {})())
    bad_path = SplitPlan({"nowhere": {"x": Split(1)}}, {}, {}, lambda model, context: lambda: None)
    bad_argument = SplitPlan({"": {"latents": Split(1)}}, {}, {}, lambda model, context: lambda: None)
    for model, plan in (
        (nn.Linear(2, 2), None),
        (tiny_wan(num_attention_heads=3), None),
        (own_processor, None),
        (tiny_wan(), bad_path),
        (tiny_wan(), bad_argument),
    ):
        try:
            parallelize(model, mesh, plan)
        except ValueError as error:
            messages.append(str(error))
    original = WanAttnProcessor.__call__
    wrapper = functools.wraps(original)(lambda *arguments: 2 * original(*arguments))
    with patch.object(WanAttnProcessor, "__call__", wrapper), pytest.raises(ValueError) as caught:
        parallelize(tiny_wan(), mesh)
    return [*messages, str(caught.value)]


def test_parallelize_says_what_does_not_fit(ranks: Ranks) -> None:
    no_plan, heads, processor, path, argument, patched = ranks(4).run(wan_messages)[0]
    assert "Linear" in no_plan and "plan" in no_plan
    assert "WanTransformer3DModel" in no_plan
    assert "register_plan" in no_plan
    assert "3 heads" in heads and "ulysses_size=4" in heads
    assert "MyProcessor" in processor
    assert "'nowhere'" in path and "WanTransformer3DModel" in path
    assert "arguments ['latents'] of WanTransformer3DModel.forward" in argument
    assert "WanAttnProcessor" in patched and "wan_messages.<locals>.<lambda>" in patched


def undone_wan_is_unchanged() -> bool:
    mesh = SequenceMesh.create("cpu", ulysses_size=4)
    model, untouched = tiny_wan().eval(), tiny_wan().eval()
    names = list(model.state_dict())
    torch.manual_seed(1)
    inputs = (torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16))
    undo = parallelize(model, mesh)
    with torch.no_grad():
        close = torch.allclose(model(*inputs).sample, untouched(*inputs).sample, atol=1e-5)
        assert list(model.state_dict()) == names
        undo()
        return close and torch.equal(model(*inputs).sample, untouched(*inputs).sample)


def test_a_split_wan_keeps_its_state_dict_and_can_be_undone(ranks: Ranks) -> None:
    assert all(ranks(4).run(undone_wan_is_unchanged))


def cached_message() -> str:
    model = tiny_wan().eval()
    parallelize(model, SequenceMesh.create("cpu", ulysses_size=2))
    model.enable_cache(FirstBlockCacheConfig())
    with torch.no_grad(), pytest.raises(ValueError) as caught:
        model(torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16))
    return str(caught.value)


def test_a_cache_that_decides_by_what_a_rank_has_is_refused(ranks: Ranks) -> None:
    assert all("FirstBlockCacheConfig" in message for message in ranks(2).run(cached_message))
