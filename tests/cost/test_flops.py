"""The work of a transformer, counted by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_videoscale.cost import TransformerFlops, training_flops
from tests.models import tiny_wan


def test_flops_of_a_transformer_without_recomputation() -> None:
    # One layer of width 2 with a middle of 3. Per token 12 * 2² + 4 * 2 * 3 = 72, per pair 4 * 2 = 8, three passes.
    # 5 samples of 10 tokens: 5 * 3 * (72 * 10 + 8 * 100) = 22 800.
    for checkpointing in (False, True):
        transformer = TransformerFlops(layers=1, width=2, ffn_width=3, checkpointing=checkpointing)
        assert training_flops(transformer, batch_size=5, sequence_length=10) == 22_800
        assert training_flops(transformer, 5, 10, sequence_parallel_size=4) == 5_700


class Wrapped(nn.Module):
    """As compiled and adapted modules are: it has the configuration of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config


def test_the_transformer_of_a_module_is_the_one_that_trains() -> None:
    module = nn.Module()
    module.average = copy.deepcopy(tiny_wan(num_layers=1)).requires_grad_(False)
    module.transformer = Wrapped(tiny_wan(num_layers=3))
    assert TransformerFlops.of_module(module) == TransformerFlops(layers=3, width=48, ffn_width=64)

    module.average.requires_grad_(True)
    with pytest.raises(ValueError, match=r"found average, transformer"):
        TransformerFlops.of_module(module)
    with pytest.raises(ValueError, match="Linear, found none"):
        TransformerFlops.of_module(nn.Linear(2, 2))


def test_of_frozen_weights_backward_computes_no_gradients() -> None:
    # As in the first test, a third pass over 72 * 10 less: 5 * (2 * 72 * 10 + 3 * 8 * 100) = 19 200.
    assert training_flops(TransformerFlops(1, 2, 3, frozen=1.0), 5, 10) == 19_200

    module = nn.Module()
    module.transformer = tiny_wan()
    module.transformer.requires_grad_(False).blocks.requires_grad_(True)
    trained, every = (sum(p.numel() for p in m.parameters()) for m in (module.transformer.blocks, module.transformer))
    assert TransformerFlops.of_module(module).frozen == pytest.approx(1 - trained / every)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_flops_are_those_that_torch_counts(adapted: bool) -> None:
    module = nn.Module()
    module.transformer = network = tiny_wan(num_layers=8)
    if adapted:
        network.requires_grad_(False).add_adapter(LoraConfig(r=1, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    # By matrix products alone, which torch counts on any device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.ones(1, 4, 4, 24, 24), torch.ones(1), torch.ones(1, 1, 16)).sample.sum().backward()
    flops = training_flops(TransformerFlops.of_module(module), 1, 4 * 12 * 12)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)
