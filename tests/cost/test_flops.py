"""The work of a transformer, counted by hand."""

from __future__ import annotations

import copy

import pytest
from torch import nn

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
