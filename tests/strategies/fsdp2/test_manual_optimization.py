"""Manual optimization under `ulysses_fsdp2`: backward and the optimizers' steps run inside of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow, all_assembled
from tests.models import gradient_error, lifted_float_casts
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, message, trainer

Ranks = Callable[[int], ProcessPool]


class Adversarial(RectifiedFlow):
    """Two optimizers take turns; each needs the other's network, and leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.critics = nn.ModuleDict({"first": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))})

    def configured(self) -> list[Any]:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        return optimizers

    def judge(self, video: Tensor) -> Tensor:
        critic: nn.Module = self.critics["first"]
        value: Tensor = critic(video.movedim(1, -1))
        return value

    def denoise(self, batch: dict[str, Tensor]) -> Tensor:
        denoised: Tensor = self.transformer(batch["noise"], batch["time"] * 1000, batch["text"]).sample
        return denoised

    def training_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        generator, critic = self.configured()
        with self.toggled_optimizer(generator):
            denoised = self.denoise(batch)
            self.manual_backward((denoised - batch["latents"]).square().mean() - self.judge(denoised).mean())
            self.clip_gradients(generator, gradient_clip_val=0.5)
            generator.step()
            generator.zero_grad()
        with self.toggled_optimizer(critic):
            with torch.no_grad():
                denoised = self.denoise(batch)
            for video, target in ((denoised, 0.0), (batch["latents"], 1.0)):  # two backwards for one step
                self.manual_backward((self.judge(video) - target).square().mean())
            critic.step()
            critic.zero_grad()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.SGD(self.transformer.parameters(), lr=0.1)
        return generator, torch.optim.SGD(self.critics.parameters(), lr=0.1)


def train(strategy: Callable[..., Any], settings: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    module = Adversarial()
    name = "critics.first.0.weight"
    before = module.get_parameter(name).detach().clone()
    with lifted_float_casts():
        trainer(strategy(**settings), max_steps=6, plugins=[DoublePrecision()]).fit(module, clips(torch.float64))
    after = all_assembled(module.named_parameters())
    return after, float((after[name] - before).norm())


def test_two_optimizers_in_turn(ranks: Ranks) -> None:
    expected, moved = ranks(1).run(train, ddp, {"find_unused_parameters": True})[0]
    assert moved > 1e-2
    for got, _ in ranks(2).run(train, fsdp2, {}):
        assert gradient_error(got, expected) <= 1e-10


class Penalized(Adversarial):
    """With a penalty on the gradients of the critic's input (R1)."""

    def judge(self, video: Tensor) -> Tensor:
        video = video.detach().requires_grad_()
        value = super().judge(video)
        (gradient,) = torch.autograd.grad(value.sum(), video, create_graph=True)
        return value + gradient.square().mean()


def penalize() -> str:
    try:
        trainer(fsdp2()).fit(Penalized(), clips())
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_a_second_backward_is_refused_with_the_way_out(ranks: Ranks) -> None:
    for text in ranks(2).run(penalize):
        assert "Sequential" in text and "ulysses_ddp" in text


class Bare(Adversarial):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def messages() -> list[str]:
    average, swa = EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)
    return [
        message(fsdp2(), Bare()),
        message(fsdp2(), RectifiedFlow(), callbacks=[average]),
        message(fsdp2(), RectifiedFlow(), callbacks=[swa]),
    ]


def test_what_is_refused_and_why(ranks: Ranks) -> None:
    bare, average, swa = ranks(2).run(messages)[0]
    assert "['scale']" in bare and "manual optimization" in bare
    assert "['EMAWeightAveraging']" in average and "SequenceParallelFSDP2Strategy" in average
    assert "['StochasticWeightAveraging']" in swa


class ByMuon(RectifiedFlow):
    """Matrices are trained by Muon, whose steps look at whole matrices, and all else by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)


def train_by_muon(strategy: Callable[..., Any]) -> tuple[dict[str, Tensor], float]:
    module = ByMuon()
    before = {path: parameter.detach().clone() for path, parameter in module.named_parameters()}
    # It makes steps orthogonal in bfloat16, where sums in another order differ.
    with lifted_float_casts(), patch.object(Tensor, "bfloat16", lambda x: x):
        trainer(strategy(), plugins=[DoublePrecision()]).fit(module, clips(torch.float64))
    after = all_assembled(module.named_parameters())
    return after, gradient_error(after, before)


def test_muon(ranks: Ranks) -> None:
    expected, moved = ranks(1).run(train_by_muon, ddp)[0]
    assert moved > 1e-2
    for got, _ in ranks(2).run(train_by_muon, fsdp2):
        assert gradient_error(got, expected) <= 1e-10
