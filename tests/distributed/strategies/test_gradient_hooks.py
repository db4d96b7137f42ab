"""Optimizers that step within backward, and other hooks on parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow, all_assembled
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class StepsInBackward(RectifiedFlow):
    """Frees each gradient as soon as it is used, which saves the memory of all of them."""

    def configure_optimizers(self) -> None:  # type: ignore[override]
        for parameter in self.parameters():
            optimizer = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: self._step(optimizer))

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


class HookedBefore(StepsInBackward):
    def __init__(self) -> None:
        super().__init__()
        super().configure_optimizers()

    def configure_optimizers(self) -> None:  # type: ignore[override]
        pass


class MasksGradients(RectifiedFlow):
    """Registers what autograd calls for gradients, once parameters are shards."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.transformer.proj_out.weight.register_hook(torch.zeros_like)
        return super().configure_optimizers()


def fit(strategy: Any, module_class: type[RectifiedFlow]) -> dict[str, Tensor] | str:
    module = module_class()
    try:
        trainer(strategy()).fit(module, clips(batch_size=2))
    except ValueError as error:
        return str(error)
    return all_assembled(module.named_parameters())


def test_steps_within_backward_use_averaged_gradients_under_fsdp2(ranks: Ranks) -> None:
    (expected,) = ranks(1).run(fit, ddp, StepsInBackward)
    for weights in ranks(2).run(fit, fsdp2, StepsInBackward):
        assert gradient_error(weights, expected) < 1e-6


@pytest.mark.parametrize(
    ("strategy", "module_class", "remedy"),
    [
        (ddp, StepsInBackward, "Take ulysses_fsdp2"),
        (ddp, HookedBefore, "Take ulysses_fsdp2"),
        (fsdp2, HookedBefore, "in configure_optimizers"),
        (fsdp2, MasksGradients, "take register_post_accumulate_grad_hook"),
    ],
)
def test_hooks_that_would_see_no_averaged_gradient_are_refused(
    ranks: Ranks, strategy: Any, module_class: type[RectifiedFlow], remedy: str
) -> None:
    for message in ranks(2).run(fit, strategy, module_class):
        assert isinstance(message, str)
        assert "transformer." in message and "hooks" in message and remedy in message


def fit_by_local_sgd(subgroup_size: int, all_reduces: bool = True) -> dict[str, Tensor] | str:
    subgroup = dist.new_subgroups(subgroup_size)[0]
    state = PostLocalSGDState(None, subgroup, start_localSGD_iter=1, post_local_gradient_allreduce=all_reduces)
    local = {"ddp_comm_state": state, "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 2}
    return fit(partial(ddp, **local), RectifiedFlow)


def test_local_sgd_averages_over_whole_groups(ranks: Ranks) -> None:
    assert isinstance(ranks(2).run(fit_by_local_sgd, 2)[0], dict)
    for message in ranks(2).run(fit_by_local_sgd, 2, all_reduces=False):
        assert "gradients over no ranks, while ranks [0, 1] share sequences" in message
    for rank, message in enumerate(ranks(2).run(fit_by_local_sgd, 1)):
        assert f"over ranks [{rank}], while ranks [0, 1] share" in message
