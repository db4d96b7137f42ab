"""What a graph relies on: a change anywhere in a network is noticed, and none where there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn

from lightning_videoscale.graphs.snapshot import Snapshot, foreign_hook, stray_parameter
from lightning_videoscale.injection import inject_fused_kernels
from tests.models import tiny_wan

CPU = torch.device("cpu")


def scale_attribute(network: Any) -> None:
    network.blocks[0].norm2.eps = 0.25


def replace_parameter(network: Any) -> None:
    network.proj_out.weight = nn.Parameter(network.proj_out.weight.detach().clone())


def move_parameter(network: Any) -> None:
    network.proj_out.weight.data = network.proj_out.weight.data.clone()


def freeze(network: Any) -> None:
    network.proj_out.weight.requires_grad_(False)


def replace_module(network: Any) -> None:
    network.blocks[1].attn1.to_q = nn.Linear(8, 8)


def hook(network: Any) -> None:
    network.blocks[1].register_forward_hook(lambda *_: None)


def set_processor(network: Any) -> None:
    network.set_attention_backend("_native_math")


def change_forward(network: Any) -> None:
    network.blocks[0].ffn.forward = lambda x: x


def change_class(network: Any) -> None:
    class Other(type(network.proj_out)):  # type: ignore[misc]
        pass

    network.proj_out.__class__ = Other


def transpose(network: Any) -> None:
    weight = network.blocks[0].attn1.to_q.weight
    weight.data = weight.data.t()  # in the same place


def change_dtype(network: Any) -> None:
    # As when a network goes to the host and comes back in half the memory, where it lay before.
    network.table.data = network.table.data.view(torch.bfloat16)


def hook_on_gradient(network: Any) -> None:
    network.proj_out.weight.register_hook(lambda gradient: gradient)


def other_numbers(network: Any) -> None:
    network.numbers.add(3)


def other_steps(network: Any) -> None:
    network.steps[0] = 2


def eval_mode(network: Any) -> None:
    network.blocks[0].eval()


def inject(network: Any) -> None:
    inject_fused_kernels(network)


CHANGES = [
    scale_attribute,
    replace_parameter,
    move_parameter,
    freeze,
    replace_module,
    hook,
    set_processor,
    change_forward,
    change_class,
    transpose,
    change_dtype,
    hook_on_gradient,
    other_numbers,
    other_steps,
    eval_mode,
    inject,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    network: Any = tiny_wan()
    network.numbers, network.steps = {1, 2}, deque([1])
    network.register_buffer("table", torch.ones(4, dtype=torch.float16))
    before = Snapshot(network, CPU)
    assert before.difference() is None
    with attention_backend("native"):  # setting one sets it for all networks too, until the block ends
        change(network)
    assert before.difference() is not None
    assert Snapshot(network, CPU).difference() is None


def test_another_forward_of_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = tiny_wan()
    before = Snapshot(network, CPU)
    monkeypatch.setattr(type(network.blocks[0]), "forward", lambda self, x, *_: x)
    assert before.difference() is not None


def test_an_optimizer_step_and_equal_values_are_no_change() -> None:
    network = tiny_wan()
    before = Snapshot(network, CPU)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    network.blocks[0].norm2.eps = float(str(network.blocks[0].norm2.eps))  # another object of the same value
    network.train(network.training)
    assert before.difference() is None


def test_what_a_graph_has_read_on_the_host_is_compared() -> None:
    network: Any = tiny_wan().to("meta")
    network.rope.table = torch.tensor([1.0, float("nan")])  # which its forward may copy to the device
    before = Snapshot(network, torch.device("meta"))
    assert before.difference() is None
    network.rope.table.data[0] = 2.0
    assert before.difference() == "what a tensor on the host contains"


def test_adapters_are_part_of_it() -> None:
    config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny_wan(), config)
    network = adapted.get_base_model()
    before = Snapshot(network, CPU)
    adapted.merge_adapter()
    assert before.difference() is not None
    adapted.unmerge_adapter()
    before = Snapshot(network, CPU)
    adapted.base_model.disable_adapter_layers()
    assert before.difference() is not None


def test_hooks_of_others_are_named() -> None:
    network = tiny_wan()
    network.register_forward_hook(lambda *_: None)  # around a graph
    assert foreign_hook(network) is None
    network.blocks[1].register_forward_hook(lambda *_: None)
    assert str(foreign_hook(network)).startswith("blocks.1 has a hook")


@pytest.mark.parametrize("hold", [lambda x: [x], lambda x: {"by": [x]}, lambda x: [(x, 1)]])
def test_parameters_that_are_reached_otherwise(hold: Callable[[nn.Parameter], Any]) -> None:
    network: Any = tiny_wan()
    assert stray_parameter(network) is None
    network.blocks[1].held = hold(network.proj_out.weight)
    assert str(stray_parameter(network)).startswith("blocks.1.held")
    network.proj_out.weight.requires_grad_(False)
    assert stray_parameter(network) is None


def test_parameters_of_modules_only() -> None:
    assert stray_parameter(inject_fused_kernels_into(tiny_wan())) is None
    config = peft.LoraConfig(r=2, target_modules=["to_q"])
    adapted: Any = peft.get_peft_model(tiny_wan(), config)
    assert stray_parameter(adapted) is None


def inject_fused_kernels_into(network: nn.Module) -> nn.Module:
    inject(network)
    return network
