"""Under ZeRO, weights that a hook changes without their copies are an error: they would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.strategies.test_deepspeed import Scale, scaling, trainer

Ranks = Callable[[int], ProcessPool]


class Halving(Scale):
    """Halves the weight after each step: alone, also where stage 3 has divided it (gathered), or with its copy."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2, bias=False)
        nn.init.ones_(self.net.weight)
        self.way = way

    def on_train_batch_end(self, *_: Any) -> None:
        import deepspeed

        weight = self.net.weight
        half = deepspeed.utils.safe_get_full_fp32_param(weight) / 2
        if self.way == "alone":
            weight.data.mul_(0.5)
            return
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(half)
        if self.way == "with its copy":
            deepspeed.utils.safe_set_full_fp32_param(weight, half)


def halve(stage: int, way: str, largest_whole: int) -> list[list[float]] | str:
    from deepspeed.utils import safe_get_full_fp32_param

    selected, module = scaling(stage, 2), Halving(way)
    selected.config["zero_optimization"] |= {"stage3_param_persistence_threshold": largest_whole}
    with deepspeed_on_cpu():
        try:
            trainer(selected, max_steps=2).fit(module, DataLoader([torch.zeros(2)] * 2, batch_size=None))
        except ValueError as error:
            return str(error)
        return safe_get_full_fp32_param(module.net.weight).tolist()


@needs_deepspeed
@pytest.mark.parametrize(("stage", "largest_whole"), [(1, 0), (3, 100), (3, 0)])
def test_weights_that_a_hook_changes_are_changed_with_their_copies(
    ranks: Ranks, stage: int, largest_whole: int
) -> None:
    is_empty_between_steps = stage == 3 and largest_whole == 0
    for way in ("gathered",) if is_empty_between_steps else ("alone", "gathered"):
        assert "['net.weight'] were changed by something else" in ranks(2).run(halve, stage, way, largest_whole)[0]
    assert ranks(2).run(halve, stage, "with its copy", largest_whole) == [[[0.25], [0.25]]] * 2
