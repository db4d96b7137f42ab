"""Steps that take features from inside of a network by hooks of their own train as on one device.

Distillation with a head on a network's features, alignment with an encoder's, and a branch whose blocks' outputs are
added to those of a frozen network.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn

from lightning_videoscale.parallel import gather_sequence, split_sequence
from tests.distributed.parity import SGDFlow
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import all_assembled
from tests.models import gradient_error, lifted_float_casts, tiny_wan
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Aligned(SGDFlow):
    """Features of every block, in a list that the step clears."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.transformer.blocks:
            block.register_forward_hook(lambda _, __, hidden: self.features.append(hidden))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.features.clear()
        loss = super().loss(batch)
        first, _ = self.features
        return loss + gather_sequence(first.square().mean(-1), 1, self.transformer).mean()


class Judged(SGDFlow):
    """A head on the features of a network whose output nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.head = nn.Linear(48, 1)
        self.hidden = torch.empty(0)
        self.transformer.blocks[0].register_forward_hook(self.keep)
        for unused in (self.transformer.blocks[1], self.transformer.proj_out):
            unused.requires_grad_(False)
        self.transformer.scale_shift_table.requires_grad_(False)

    def keep(self, _: Any, __: Any, hidden: Tensor) -> None:
        self.hidden = hidden

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.transformer(batch["noise"], batch["time"] * 1000, batch["text"])
        return nn.functional.softplus(gather_sequence(self.head(self.hidden), 1, self.transformer)).mean()


class Controlled(SGDFlow):
    """A branch that trains; a frozen network's blocks add what the branch's blocks have returned."""

    networks = ("transformer", "branch")

    def __init__(self) -> None:
        super().__init__()
        self.transformer.requires_grad_(False)
        self.branch = tiny_wan()
        self.branch.proj_out.requires_grad_(False)
        self.branch.scale_shift_table.requires_grad_(False)
        self.controls: list[Tensor] = []
        for number, block in enumerate(self.transformer.blocks):
            self.branch.blocks[number].register_forward_hook(self.keep)
            block.register_forward_hook(lambda _, __, hidden, number=number: hidden + self.controls[number])

    def keep(self, _: Any, __: Any, hidden: Tensor) -> None:
        self.controls.append(hidden)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.controls.clear()
        self.branch(batch["latents"], batch["time"] * 1000, batch["text"])
        return super().loss(batch)


class Encoded(SGDFlow):
    """An encoder that is not split, whose features are added to the hidden states of a block."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.encoder = nn.Conv3d(4, 48, (1, 2, 2), (1, 2, 2))
        self.features = torch.empty(0)
        self.split: Callable[..., Tensor] = (lambda x, *_: x) if whole else split_sequence
        self.transformer.blocks[0].register_forward_hook(self.add)

    def add(self, _: Any, __: Any, hidden: Tensor) -> Tensor:
        return hidden + self.split(self.features, 1, self.transformer)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.features = self.encoder(batch["latents"]).flatten(2).transpose(1, 2)
        return super().loss(batch)


def train(kind: type[SGDFlow], strategy: Callable[..., Any]) -> dict[str, Tensor]:
    module = kind()
    named = list(getattr(kind, "networks", ["transformer"]))
    with lifted_float_casts():
        trainer(strategy(modules=named), plugins=[DoublePrecision()]).fit(module, clips(torch.float64))
    return all_assembled(module.named_parameters())


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(kind, strategy, marks=() if i % 2 == j else pytest.mark.full)
        for i, kind in enumerate((Aligned, Judged, Controlled, Encoded))
        for j, strategy in enumerate((ddp, fsdp2))
    ],
)
def test_features_from_hooks_train_as_on_one_device(
    ranks: Ranks, kind: type[SGDFlow], strategy: Callable[..., Any]
) -> None:
    expected = ranks(1).run(train, kind, ddp)[0]
    for got in ranks(2).run(train, kind, strategy):
        assert gradient_error(got, expected) <= 1e-10


def add_whole_features() -> str:
    try:
        trainer(ddp()).fit(Encoded(whole=True), clips())
    except RuntimeError as error:
        return "".join(traceback.format_exception_only(error))
    return "trained"


def test_features_of_all_tokens_are_told_how_to_be_split(ranks: Ranks) -> None:
    for message in ranks(2).run(add_whole_features):
        assert "must match the size" in message
        assert "lightning_videoscale.parallel.split_sequence" in message
