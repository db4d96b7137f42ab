"""ControlNets of diffusers train beside a frozen network whose sequence is split, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from diffusers import FluxControlNetModel, QwenImageControlNetModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.families.harness import Case, lifted_casts
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.families.test_training import Inputs
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import all_assembled
from tests.models import gradient_error
from tests.strategies.fsdp2.training import ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Pictures(Inputs):
    """What the ControlNet is given comes beside what both networks take."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = super().__getitem__(index)
        generator = torch.Generator().manual_seed(index)
        shown = torch.randn(inputs["hidden_states"].shape, generator=generator, dtype=torch.float64)
        return {name: value for name, value in inputs.items() if value is not None} | {"controlnet_cond": shown}


class Controlling(pl.LightningModule):
    """No line about sequence parallelism."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.transformer = FAMILIES[case.family].model(case).requires_grad_(False)
        kind = {"flux": FluxControlNetModel, "qwen_image": QwenImageControlNetModel}[case.family]
        sizes = {"num_layers": 1, "num_single_layers": 1} if case.family == "flux" else {"num_layers": 1}
        heads = {name: self.transformer.config[name] for name in ("attention_head_dim", "num_attention_heads")}
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.controlnet = kind.from_transformer(self.transformer, **sizes, **heads).double()
            for parameter in self.controlnet.parameters():  # some start at zero
                nn.init.normal_(parameter, std=0.2)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        residuals = self.controlnet(**batch, return_dict=False)
        residuals = residuals if self.transformer.config.get("num_single_layers") else (residuals,)
        names = ("controlnet_block_samples", "controlnet_single_block_samples")
        given = {name: value for name, value in batch.items() if name != "controlnet_cond"}
        (out,) = self.transformer(**given, **dict(zip(names, residuals, strict=False)), return_dict=False)
        loss: Tensor = (out - batch["hidden_states"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.controlnet.parameters(), lr=0.1, momentum=0.9)


def train(family: str, strategy: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    case = Case(family)
    module = Controlling(case)
    with lifted_casts():
        trainer(strategy(**settings)).fit(module, DataLoader(Pictures(case), batch_size=None))
    return all_assembled(module.controlnet.named_parameters())


@pytest.mark.parametrize(
    ("family", "strategy", "settings"),
    [
        pytest.param("flux", ddp, {"find_unused_parameters": True}, marks=pytest.mark.full),
        ("flux", fsdp2, {"schedule": "sliced"}),
        pytest.param("qwen_image", fsdp2, {"activation_checkpointing": True}, marks=pytest.mark.full),
        ("qwen_image", ddp, {"ring_size": 2, "find_unused_parameters": True}),
    ],
)
def test_a_controlnet_trains_as_on_one_device(
    ranks: Ranks, family: str, strategy: Callable[..., Any], settings: dict[str, Any]
) -> None:
    (expected,) = ranks(1).run(train, family, ddp, {"find_unused_parameters": True})
    begun = {name: p.detach() for name, p in Controlling(Case(family)).controlnet.named_parameters()}
    assert gradient_error(expected, begun) > 1e-3
    for got in ranks(2).run(train, family, strategy, settings):
        assert gradient_error(got, expected) <= 1e-10
