"""Adapters of peft around the network: split, sharded and trained as on one device, wherever the network is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn

from lightning_videoscale.parallel import SplitPlan, find_plan
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Record, RectifiedFlow, all_assembled
from tests.models import gradient_error, lifted_float_casts, tiny_wan
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


def adapted(network: nn.Module, **kwargs: Any) -> peft.PeftModel:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False, **kwargs)
    return peft.get_peft_model(network, config)


class Lora(RectifiedFlow):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = adapted(self.transformer)


class LateDora(RectifiedFlow):
    def configure_model(self) -> None:
        if not isinstance(self.transformer, peft.PeftModel):
            self.transformer = adapted(self.transformer, use_dora=True)


class KeptBefore(RectifiedFlow):
    """Has the network beside its adapter, under a name of its own that comes first."""

    def __init__(self) -> None:
        super().__init__()
        base = self.transformer
        del self.transformer
        self.base = base
        self.transformer = adapted(base)


class KeptAfter(Lora):
    """As where the network is needed without its adapter; all of its head trains too."""

    def __init__(self) -> None:
        RectifiedFlow.__init__(self)
        self.transformer = adapted(self.transformer, modules_to_save=["proj_out"])
        self.base = self.transformer.get_base_model()


class Distilled(Lora):
    """The teacher is frozen, and adapted too."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = adapted(tiny_wan()).requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.teacher(batch["noise"], batch["time"], batch["text"]).sample.square().mean()


class Steps(NamedTuple):
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def fit(module_class: type[RectifiedFlow], settings: list[dict[str, Any]]) -> list[Steps]:
    """Two steps in float64 under each of the settings, and what the parameters are then."""
    found = []
    for setting in settings:
        record, module, options = Record(), module_class(), dict(setting)
        with lifted_float_casts():
            strategy = options.pop("strategy")(**options)
            # All settings train on the same two clips a step: of a group, or of one for each of two ranks.
            loader = clips(torch.float64, 2 * options["ulysses_size"] // dist.get_world_size())
            trainer(strategy, plugins=[DoublePrecision()], callbacks=[record]).fit(module, loader)
        found.append(Steps(record.gradients, all_assembled(module.named_parameters())))
    return found


ALL = [*itertools.product((fsdp2, ddp), (1, 2))]
CROSSED = [[(fsdp2, 1), (ddp, 2)], [(fsdp2, 2), (ddp, 1)]]


def compare(
    ranks: Ranks, module_class: type[RectifiedFlow], strategies: list[tuple[Any, int]] = ALL, **kwargs: Any
) -> None:
    """Under strategies with a number of ranks per group."""
    (expected,) = ranks(1).run(fit, module_class, [{"strategy": ddp, "ulysses_size": 1, **kwargs}])[0]
    settings = [{"strategy": strategy, "ulysses_size": size, **kwargs} for strategy, size in strategies]
    for got in ranks(2).run(fit, module_class, settings)[0]:
        assert len(got.gradients) == 2 and any("lora_B" in name for name in got.gradients[0])
        for gradients, wanted in zip(got.gradients, expected.gradients, strict=True):
            assert gradients.keys() == wanted.keys()
            assert gradient_error(gradients, wanted) <= 1e-10
        assert got.weights.keys() == expected.weights.keys()
        assert gradient_error(got.weights, expected.weights) <= 1e-10


@pytest.mark.parametrize(
    ("module_class", "strategies"),
    [(Lora, ALL), (LateDora, CROSSED[1]), (KeptBefore, CROSSED[0]), (KeptAfter, CROSSED[1])],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_adapters_train_as_on_one_device(
    ranks: Ranks, module_class: type[RectifiedFlow], strategies: list[tuple[Any, int]]
) -> None:
    compare(ranks, module_class, strategies)


def test_the_adapter_may_be_named_for_what_it_adapts(ranks: Ranks) -> None:
    compare(ranks, Distilled, CROSSED[0], modules=["transformer"])


def own_plan() -> SplitPlan:
    found = find_plan(tiny_wan())
    assert found is not None
    return SplitPlan(found.inputs, found.outputs, found.gathers, found.attention, exact=True)


def test_a_plan_for_the_network_serves_its_adapter(ranks: Ranks) -> None:
    compare(ranks, Lora, CROSSED[1], modules=["transformer"], plan=own_plan())


class Switched(RectifiedFlow):
    """Checkpoints itself, and scores by another adapter before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer.requires_grad_(False)
        config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
        for name in ("student", "critic"):
            self.transformer.add_adapter(config, adapter_name=name)
        self.transformer.enable_gradient_checkpointing()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.transformer.set_adapter("student")
        loss = super().loss(batch)
        self.transformer.set_adapter("critic")
        self.transformer.requires_grad_(True)  # else torch finds fewer tensors to keep, and says so
        return loss


def said_of_switched() -> str:
    try:
        trainer(ddp(ulysses_size=1)).fit(Switched(), clips(torch.float32, 1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_adapters_that_a_network_which_checkpoints_itself_is_not_computed_again_by(ranks: Ranks) -> None:
    (message,) = ranks(1).run(said_of_switched)
    assert "they were ['student']" in message and "are ['critic']" in message
