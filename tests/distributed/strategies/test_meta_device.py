"""Under DDP too, networks may be built on the meta device, if their modules define the values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.pool import ProcessPool
from tests.strategies.fsdp2.test_sharding import Configured
from tests.strategies.fsdp2.training import clips, ddp, trainer

Ranks = Callable[[int], ProcessPool]


def fit(without_reset: bool = False) -> list[Tensor] | str:
    torch.manual_seed(dist.get_rank())  # rank 0's initial values are everybody's
    module = Configured(without_reset=without_reset)
    try:
        trainer(ddp(ulysses_size=1)).fit(module, clips())
    except ValueError as error:
        return str(error)
    return [parameter.detach() for parameter in module.parameters()]


def test_what_has_no_memory_is_initialized_and_the_rest_left_alone(ranks: Ranks) -> None:
    first, second = ranks(2).run(fit)
    assert len(first) == len(second) == 10
    assert all(map(torch.equal, first, second))
    assert [float(x) for x in first if x.numel() == 1].count(7.0) == 1


def test_what_nothing_defines_is_named(ranks: Ranks) -> None:
    for message in ranks(2).run(fit, without_reset=True):
        assert "['net.table'] were built on the meta device" in message
