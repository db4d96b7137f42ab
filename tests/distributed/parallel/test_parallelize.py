"""Whole models on four ranks, in plain PyTorch: recomputed, refused, undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    parallelize,
    sequence_parallel_attention,
)
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]


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


def called_directly() -> str:
    model = tiny_wan().eval()
    inputs = (torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16))
    parallelize(model, SequenceMesh.create("cpu", ulysses_size=2))
    with torch.no_grad():
        model(*inputs)
        with pytest.raises(RuntimeError) as caught:
            model.forward(*inputs)  # whose hooks do not run, so that nothing begins a pass
    return str(caught.value)


def test_a_forward_called_directly_is_an_error(ranks: Ranks) -> None:
    assert all("not network.forward(...)" in message for message in ranks(2).run(called_directly))
