"""Under `ulysses_fsdp2`, an error of torch about shards is followed by what to do about it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.models import tiny_wan
from tests.strategies.fsdp2.training import clips, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Distilled(RectifiedFlow):
    """With a teacher that follows the student, and that nobody has named."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.transformer).requires_grad_(False)

    def on_before_zero_grad(self, *_: object) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.teacher.parameters(), self.transformer.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)


class CopiedLate(RectifiedFlow):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.transformer).requires_grad_(False)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = tiny_wan()
        self.scale = nn.Parameter(torch.ones(4, 1, 1, 1))

    def denoise(self, batch: dict[str, Tensor]) -> Tensor:
        noise: Tensor = batch["noise"]
        return noise - self.network(noise * self.scale, batch["time"] * 1000, batch["text"]).sample


class ByAnotherMethod(RectifiedFlow):
    """Calls no forward of the module that holds a parameter."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.denoiser = Denoiser()

    def training_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        self.manual_backward((self.denoiser.denoise(batch) - batch["latents"]).square().mean())


def message(kind: type[RectifiedFlow]) -> str:
    module = kind()
    networks = ["denoiser"] if kind is ByAnotherMethod else ["transformer"]
    try:
        trainer(fsdp2(modules=networks)).fit(module, clips())
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (Distilled, "name it in shard_frozen=[...]"),
        (CopiedLate, "Copy the network before it is sharded"),
        (ByAnotherMethod, "call the module itself rather than another method of it"),
    ],
)
def test_an_error_about_shards_says_what_to_do(ranks: Ranks, kind: type[RectifiedFlow], advice: str) -> None:
    for said in ranks(2).run(message, kind):
        assert advice in said
