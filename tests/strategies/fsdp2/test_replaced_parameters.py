"""Under `ulysses_fsdp2`, a network cannot be called with other weights than its own: they would be ignored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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


class Meta(RectifiedFlow):
    """Under manual optimization, where every child is sharded: a critic is asked with weights one step ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        ahead = {name: 0.9 * parameter for name, parameter in self.critic.named_parameters()}
        values = torch.func.functional_call(self.critic, ahead, batch["latents"].movedim(1, -1))
        self.manual_backward(values.square().mean())


def train(kind: type[RectifiedFlow], sharded: bool) -> str:
    strategy = fsdp2() if sharded else ddp(find_unused_parameters=True)
    try:
        trainer(strategy, max_epochs=1, limit_train_batches=1).fit(kind(), clips())
    except NotImplementedError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("kind", "named"), [(Perturbed, "WanTransformer3DModel"), (Meta, "Linear")])
def test_other_weights_are_refused_with_the_way_out(ranks: Ranks, kind: type[RectifiedFlow], named: str) -> None:
    for said in ranks(2).run(train, kind, True):
        assert said.startswith(f"{named} is called with other tensors")
        assert "functional_call" in said
        assert "ulysses_ddp" in said
    assert ranks(2).run(train, kind, False) == ["trained"] * 2
