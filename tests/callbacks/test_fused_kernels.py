"""FusedKernels: the injection happens after the model is built and before it is wrapped."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.injection.fused_block import fused_block_of
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.models import tiny_wan


class WanInInit(pl.LightningModule):
    """Trains a tiny Wan on noise; the network is built with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_when_optimized: bool | None = None
        self.network: nn.Module = self.build()

    def build(self) -> nn.Module:
        return tiny_wan(num_layers=1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        b = len(batch["x"])
        text = torch.ones(b, 3, 16)
        (out,) = self.network(torch.ones(b, 4, 1, 4, 4), torch.full((b,), 500), text, return_dict=False)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fused_when_optimized = is_fused(self)
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class WanInConfigureModel(WanInInit):
    """The network is built on the device, as sharding strategies ask for."""

    def build(self) -> nn.Module:
        return nn.Identity()

    def configure_model(self) -> None:
        if isinstance(self.network, nn.Identity):
            self.network = tiny_wan(num_layers=1)


class WanInSetup(WanInInit):
    """The network is built in `setup`, which Lightning calls after the callbacks' `setup`."""

    def build(self) -> nn.Module:
        return nn.Identity()

    def setup(self, stage: str) -> None:
        if isinstance(self.network, nn.Identity):
            self.network = tiny_wan(num_layers=1)


def is_fused(module: WanInInit) -> bool:
    return fused_block_of(module.network.get_submodule("blocks.0")) is not None


class TransformingStrategy(SingleDeviceStrategy):
    """Stands for a strategy of ours: it runs transforms itself, between `configure_model` and wrapping."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.transforms: list[Any] = []

    def add_model_transform(self, transform: Any) -> None:
        self.transforms.append(transform)

    def setup(self, trainer: pl.Trainer) -> None:
        while self.transforms:
            self.transforms.pop()(self.lightning_module)
        super().setup(trainer)


@pytest.mark.parametrize("module_class", [WanInInit, WanInConfigureModel, WanInSetup])
@pytest.mark.parametrize("strategy", ["auto", TransformingStrategy])
def test_injects_wherever_the_network_is_built(module_class: type[WanInInit], strategy: Any) -> None:
    callback, module = FusedKernels(), module_class()
    own_configure_model = is_overridden("configure_model", module)
    trainer = trainer_with(callback, strategy=strategy if strategy == "auto" else strategy())
    trainer.fit(module, batches_of([Meta(2, 4)]))

    assert module.fused_when_optimized
    assert callback.report is not None
    assert callback.report.replaced[0].path == "network.blocks.0"
    assert is_overridden("configure_model", module) == own_configure_model  # nothing of ours stays on the module
    callback.report.undo()
    assert not is_fused(module)


def test_a_second_run_keeps_the_first_report() -> None:
    callback, module = FusedKernels(), WanInInit()
    trainer = trainer_with(callback)
    trainer.fit(module, batches_of([Meta(2, 4)]))
    first = callback.report
    trainer.fit(module, batches_of([Meta(2, 4)]))
    assert callback.report is first and is_fused(module)


def test_another_model_has_a_report_of_its_own() -> None:
    callback = FusedKernels()
    trainer_with(callback).fit(WanInInit(), batches_of([Meta(2, 4)]))
    with pytest.warns(UserWarning, match="no block .*Slope"):
        trainer_with(callback).fit(Slope(), batches_of([Meta(2, 4)]))
    assert callback.report is not None
    assert (callback.report.model, callback.report.replaced) == ("Slope", [])


def test_a_model_without_known_blocks_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="no block .*Slope"):
        trainer_with(FusedKernels()).fit(Slope(), batches_of([Meta(2, 4)]))


def test_the_state_dict_is_that_of_the_plain_model() -> None:
    fused, plain = WanInInit(), WanInInit()
    trainer_with(FusedKernels(), max_epochs=0).fit(fused, batches_of([Meta(2, 4)]))
    assert list(fused.state_dict()) == list(plain.state_dict())
