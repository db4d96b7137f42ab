"""Under `ulysses_fsdp2`, a network cannot be called with other weights than its own: they would be ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Perturbed(RectifiedFlow):
    """Computes its target with other weights, as where a teacher is an average of the network's."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = batch["noise"], batch["time"] * 1000, batch["text"]
        average = {name: 0.9 * parameter.detach() for name, parameter in self.transformer.named_parameters()}
        with torch.no_grad():
            target = torch.func.functional_call(self.transformer, average, inputs).sample
        loss: Tensor = (self.transformer(*inputs).sample - target).square().mean()
        return loss


def train(strategy: Callable[..., Any]) -> str:
    module = Perturbed()
    try:
        trainer(strategy(), max_steps=1).fit(module, clips())
    except NotImplementedError as error:
        return str(error)
    return "trained"


def test_other_weights_are_refused_with_the_way_out(ranks: Ranks) -> None:
    for said in ranks(2).run(train, fsdp2):
        assert said.startswith("WanTransformer3DModel is called with other tensors")
        assert "functional_call" in said
        assert "ulysses_ddp" in said
    assert ranks(2).run(train, ddp) == ["trained"] * 2
