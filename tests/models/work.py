"""What models compute, counted in their blocks and as their families say."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_videoscale.cost import TransformerFlops
from lightning_videoscale.families import known
from lightning_videoscale.strategies.blocks import find_blocks
from tests.distributed.families.harness import Case, Family


def forward_flops(family: Family, case: Case) -> int:
    """Counted in the blocks."""
    network = family.model(case)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        network(**family.inputs(case, 0))
    counts = counter.get_flop_counts()
    return sum(sum(counts[f"{type(network).__name__}.{path}"].values()) for path in find_blocks(network))


def flops_of_defaults(cls: type, sizes: Mapping[str, Any]) -> TransformerFlops:
    """Of a model with the defaults of its class, but for these sizes."""
    defaults = {name: each.default for name, each in inspect.signature(cls.__init__).parameters.items()}
    flops: TransformerFlops = known("FLOPS", cls)(defaults | sizes)
    return flops
