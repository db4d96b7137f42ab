"""Finding transformer blocks, and recomputing their activations."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from lightning_videoscale.strategies.blocks import checkpoint_activations, find_blocks, watch_own_checkpoints
from tests.distributed.families.models.hunyuan_video import build
from tests.models import tiny_wan


def test_blocks_of_a_diffusers_model_are_those_it_names() -> None:
    assert list(find_blocks(tiny_wan(num_layers=3))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_of_a_network_that_peft_adapts_are_those_of_its_family() -> None:
    config = peft.LoraConfig(r=2, target_modules=["to_q"])
    model = peft.get_peft_model(build(), config)
    assert list(find_blocks(model)) == [f"base_model.model.{path}" for path in find_blocks(build())]
    assert not any("refiner" in path or "embed" in path for path in find_blocks(model))


def test_blocks_of_ones_own_model_are_lists_of_one_class() -> None:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, batch_first=True)

    model = nn.Module()
    model.double = nn.ModuleList(block() for _ in range(2))
    model.single = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), block()) for _ in range(2)])
    model.mixed = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
    assert list(find_blocks(model)) == ["double.0", "double.1", "single.0", "single.1"]


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential.*{'Linear': 2}"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def run(model: nn.Module) -> tuple[torch.Tensor, int]:
    """Returns the gradient of the patch embedding, and the bytes kept for backward."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    inputs = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(*inputs).sample.square().mean()
    loss.backward()
    return model.get_submodule("patch_embedding").weight.grad.clone(), sum(kept.values())


def test_checkpointing_keeps_less_and_changes_nothing() -> None:
    model = tiny_wan(num_layers=4)
    names = list(model.state_dict())
    gradient, kept = run(model)
    undo = checkpoint_activations(model)
    assert list(model.state_dict()) == names
    recomputed_gradient, kept_less = run(model)
    assert torch.equal(gradient, recomputed_gradient)
    assert kept_less < kept / 2
    undo()
    assert run(model)[1] == kept


@pytest.mark.parametrize(("share", "recomputed"), [(0.7, 7), (0.3, 3), (0.01, 1), (0.0, 0), (1.0, 10)])
def test_a_share_of_the_blocks_is_recomputed_the_first_ones(share: float, recomputed: int) -> None:
    model = tiny_wan(num_layers=10)
    calls = dict.fromkeys(range(10), 0)
    for number, block in enumerate(model.blocks):
        block.ffn.register_forward_pre_hook(lambda *_, number=number: calls.update({number: calls[number] + 1}))
    gradient, kept = run(model)
    calls.update(dict.fromkeys(calls, 0))
    checkpoint_activations(model, share)
    recomputed_gradient, kept_less = run(model)
    assert list(calls.values()) == [2] * recomputed + [1] * (10 - recomputed)
    assert torch.equal(gradient, recomputed_gradient)
    assert kept_less == pytest.approx(kept * (1 - recomputed / 10), rel=0.15, abs=0.1 * kept)


def adapted_wan(by_diffusers: bool) -> Any:
    model: Any = tiny_wan()
    model.requires_grad_(False)
    for name in ("student", "critic"):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name=name)
    model.set_adapter("student")
    if by_diffusers:
        model.enable_gradient_checkpointing()
        watch_own_checkpoints(model)
    else:
        checkpoint_activations(model)
    return model


@pytest.mark.parametrize("by_diffusers", [False, True])
def test_adapters_that_another_call_changed_are_active_again_before_backward(by_diffusers: bool) -> None:
    model = adapted_wan(by_diffusers)
    inputs = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))
    loss = model(*inputs).sample.square().mean()
    model.set_adapter("critic")
    model.requires_grad_(True)  # else torch finds fewer tensors to keep, and says so
    with pytest.raises(RuntimeError, match=r"attn1.to_q of a block they were \['student'\].* are \['critic'\]"):
        loss.backward()
    model.set_adapter("student")
    loss = model(*inputs).sample.square().mean()
    model.disable_adapters()
    model(*inputs)
    model.enable_adapters()
    loss.backward()


@pytest.mark.parametrize("by_diffusers", [False, True])
def test_a_scale_that_ends_with_the_call_is_refused_in_backward(by_diffusers: bool) -> None:
    model = adapted_wan(by_diffusers)
    inputs = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))
    with pytest.raises(RuntimeError, match=r"scaled by {.*set_adapters\(names, weights=...\)"):
        model(*inputs, attention_kwargs={"scale": 0.5}).sample.mean().backward()
    model.set_adapters(["student"], weights=[0.5])
    model(*inputs).sample.mean().backward()


def test_a_copy_of_a_network_that_checkpoints_itself_looks_at_its_own_adapters() -> None:
    model = adapted_wan(by_diffusers=True)
    average = copy.deepcopy(model)
    average.set_adapter("critic")
    inputs = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))
    losses = [network(*inputs).sample.mean() for network in (model, average)]
    average.set_adapter("student")
    average.requires_grad_(True)
    losses[0].backward()
    with pytest.raises(RuntimeError, match=r"they were \['critic'\].* are \['student'\]"):
        losses[1].backward()


def test_a_model_that_checkpoints_itself_is_not_checkpointed_twice() -> None:
    model = tiny_wan()
    model.enable_gradient_checkpointing()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        checkpoint_activations(model)
