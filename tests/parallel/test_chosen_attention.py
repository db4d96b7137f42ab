"""A network that is not split asks for its kernels too; what users chose by diffusers or torch comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.attention import KERNELS, AttentionChoices
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.branch_bias import last_linear
from lightning_videoscale.parallel import find_plan
from lightning_videoscale.parallel.chosen_attention import choose_attention
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.models import tiny_wan

INPUTS = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))


def results(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    out = model(*INPUTS).sample
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def choose(model: nn.Module, backend: Any) -> Any:
    plan = find_plan(model)
    assert plan is not None
    return choose_attention(model, plan, AttentionChoices(backend))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the queries that the kernel `math` is called with."""
    seen: list[int] = []

    def counted(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append(q.shape[2])
        return products.forward(q, *others)

    products = KERNELS["math"]
    monkeypatch.setitem(KERNELS, "math", products._replace(forward=counted))
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_attention_of_a_whole_network_runs_on_the_kernel_asked_for(fused: bool, calls: list[int]) -> None:
    model = tiny_wan()
    if fused:
        inject_fused_kernels(model)
    before = results(model)
    undo = choose(model, "math")
    if fused:  # what is put around attention takes nothing away from the fused block
        assert isinstance(last_linear(model.blocks[0].attn1), nn.Linear)
    after = results(model)
    assert len(calls) == 2 * len(model.blocks)  # self- and cross-attention
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model), before, strict=True))


def test_auto_changes_no_bit_on_a_cpu_and_no_module_where_nothing_can_be_chosen() -> None:
    model = tiny_wan()
    before = results(model)
    undo = choose(model, "auto")
    assert all(torch.equal(a, b) for a, b in zip(results(model), before, strict=True))
    undo()
    choices = AttentionChoices("auto")
    choices.prepare(torch.device("cpu"))
    plan = find_plan(model)
    assert plan is not None
    choose_attention(model, plan, choices)
    assert not any("forward" in vars(module) for module in model.modules())


def test_checkpoints_and_compiled_blocks_call_it_too(calls: list[int]) -> None:
    model = tiny_wan()
    before = results(model)
    choose(model, "math")
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)
    after = results(model)
    assert len(calls) == 4 * len(model.blocks)  # once more in backward
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_blocks_call_it_too(calls: list[int], fused: bool) -> None:
    model = tiny_wan()
    if fused:
        inject_fused_kernels(model)
    before = results(model)
    choose(model, "math")
    compile_blocks(model, {"backend": "aot_eager", "fullgraph": True})
    after = results(model)
    assert len(calls) == 2 * len(model.blocks)
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_backend_of_diffusers_comes_first_under_auto(calls: list[int]) -> None:
    model = tiny_wan()
    plan = find_plan(model)
    assert plan is not None
    choices = AttentionChoices("auto", candidates=["math"])
    choose_attention(model, plan, choices)
    model.set_attention_backend("native")
    results(model)
    choices.prepare(torch.device("cpu"))
    choices.settle()
    assert choices.chosen == {} and calls == []
