"""What a graph relies on: a change anywhere in a network is noticed, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn

from lightning_videoscale.graphs.snapshot import Snapshot, foreign_hook
from lightning_videoscale.injection import inject_fused_kernels
from tests.models import tiny_wan


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
    eval_mode,
    inject,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    network = tiny_wan()
    before = Snapshot(network)
    assert before.difference() is None
    with attention_backend("native"):  # setting one sets it for all networks too, until the block ends
        change(network)
    assert before.difference() is not None
    assert Snapshot(network).difference() is None


def test_an_optimizer_step_and_equal_values_are_no_change() -> None:
    network = tiny_wan()
    before = Snapshot(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    network.blocks[0].norm2.eps = float(str(network.blocks[0].norm2.eps))  # another object of the same value
    network.train(network.training)
    assert before.difference() is None


def test_adapters_are_part_of_it() -> None:
    config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny_wan(), config)
    network = adapted.get_base_model()
    before = Snapshot(network)
    adapted.merge_adapter()
    assert before.difference() is not None
    adapted.unmerge_adapter()
    before = Snapshot(network)
    adapted.base_model.disable_adapter_layers()
    assert before.difference() is not None


def test_hooks_of_others_are_named() -> None:
    network = tiny_wan()
    network.register_forward_hook(lambda *_: None)  # around a graph
    assert foreign_hook(network) is None
    network.blocks[1].register_forward_hook(lambda *_: None)
    assert str(foreign_hook(network)).startswith("blocks.1 has a hook")
