"""ZeRO-1, 2 and 3 over split sequences train as one device does with all ranks' batches, on real DeepSpeed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]
Mesh = tuple[int, int, int]
CLIP = 0.1

pytestmark = needs_deepspeed


class Clips(Dataset[dict[str, Tensor]]):
    """Latents with their noise and timestep, so that how samples are dealt to ranks changes nothing."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latents, self.noise = torch.randn(2, 12, 4, *shape, generator=generator)
        self.timestep = torch.rand(12, generator=generator)
        self.text = torch.randn(12, 5, 16, generator=generator)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[index] for name in ("latents", "noise", "timestep", "text")}


class RectifiedFlow(pl.LightningModule):
    """An ordinary training module; computes in ``dtype`` on parameters of float32."""

    def __init__(self, dtype: torch.dtype, late: bool, checkpointing: bool = False, **config: Any) -> None:
        super().__init__()
        self.compute_dtype, self.late, self.checkpointing, self.config = dtype, late, checkpointing, config
        if not late:
            self.build()

    def build(self) -> None:
        self.transformer = tiny_wan(**self.config)
        if self.checkpointing:
            self.transformer.enable_gradient_checkpointing()

    def configure_model(self) -> None:
        if self.late:  # under stage 3 the network is partitioned as it is built
            self.build()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        batch = {name: x.to(self.compute_dtype) for name, x in batch.items()}
        sigma = batch["timestep"].view(-1, 1, 1, 1, 1)
        noisy = (1 - sigma) * batch["latents"] + sigma * batch["noise"]
        velocity = self.transformer(noisy, batch["timestep"] * 1000, batch["text"]).sample
        loss = F.mse_loss(velocity, batch["noise"] - batch["latents"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # SGD, unlike Adam, shows in the parameters by which factor a gradient was scaled or clipped.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Record(Callback):
    """Keeps every loss, every gradient that reaches the optimizer, and the parameters at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        loss = trainer.strategy.reduce(trainer.callback_metrics["loss"], reduce_op="mean")  # of all ranks' samples
        self.losses.append(float(loss))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        gradients = {name: self.gradient(p) for name, p in module.named_parameters() if p.requires_grad}
        self.gradients.append(gradients)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = {name: self.parameter(p) for name, p in module.named_parameters() if p.requires_grad}

    def gradient(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.clone()

    def parameter(self, parameter: Tensor) -> Tensor:
        return parameter.detach().clone()


class RecordUnderDeepSpeed(Record):
    def gradient(self, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).clone()

    def parameter(self, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).clone()


@contextmanager
def float64_inside() -> Iterator[None]:
    """Layers compute in their input's float64 on parameters of float32, the only ones that ZeRO takes.

    The rounding that remains is that of the gradients, which ZeRO keeps in float32.
    """

    def widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return function(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)

        return call

    names = ("linear", "conv3d", "layer_norm", "rms_norm")
    with lifted_float_casts(), patch.multiple(F, **{name: widened(getattr(F, name)) for name in names}):
        yield


Result = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]


def fit(case: str, dtype: torch.dtype, stage: int | None = None, mesh: Mesh = (1, 1, 1), late: bool = False) -> Result:
    """One epoch of three micro-batches of four samples; a step after two of them, and another at the end.

    Without a stage, on one device.
    """
    shape, module, settings, clip = CASES[case]
    dp, ring, ulysses = mesh
    record = Record() if stage is None else RecordUnderDeepSpeed()
    with ExitStack() as contexts:
        if dtype is torch.float64:
            contexts.enter_context(float64_inside())
        strategy: Any
        if stage is None:
            strategy = SequenceParallelDDPStrategy(ulysses_size=1)
        else:
            contexts.enter_context(deepspeed_on_cpu())
            strategy = SequenceParallelDeepSpeedStrategy(stage, ulysses_size=ulysses, ring_size=ring, **settings)
            if dtype is torch.float64:  # or DeepSpeed would replace the widened F.linear by its own
                strategy.config["zero_optimization"]["memory_efficient_linear"] = False
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=torch.distributed.get_world_size(),
            accumulate_grad_batches=2,
            gradient_clip_val=clip,
            max_steps=2,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(3)
        trainer.fit(RectifiedFlow(dtype, late, **module), DataLoader(Clips(shape), batch_size=4 // dp))
    return record.losses, record.gradients, record.parameters


# Shape of the latents, the model, the strategy's settings, and the norm to clip to.
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], float | None]] = {
    "even": ((2, 4, 4), {}, {}, None),
    "odd_heads": ((1, 4, 6), {"num_attention_heads": 5}, {}, CLIP),
    "odd_length": ((3, 6, 10), {}, {"activation_checkpointing": True}, CLIP),
    "own_checkpointing": ((2, 4, 4), {"checkpointing": True}, {}, CLIP),
}
MESHES: list[Mesh] = [(4, 1, 1), (2, 1, 2), (1, 1, 4)]


@functools.cache
def on_one_device(one: ProcessPool, case: str, dtype: torch.dtype) -> Result:
    result: Result = one.run(fit, case, dtype)[0]
    return result


def check(got: Result, expected: Result, gradients: float, parameters: float) -> None:
    assert got[0] == pytest.approx(expected[0], rel=parameters)
    assert len(got[1]) == len(expected[1]) == 2
    for a, b in zip(got[1], expected[1], strict=True):
        assert gradient_error(a, b) <= gradients
    assert gradient_error(got[2], expected[2]) <= parameters


# Every pair of a stage with a mesh, and of a case with either, once at least.
SELECTED = [
    ("even", 1, (4, 1, 1), False),
    ("odd_heads", 1, (2, 1, 2), False),
    ("odd_length", 1, (1, 1, 4), False),
    ("odd_heads", 2, (4, 1, 1), False),
    ("odd_length", 2, (2, 1, 2), False),
    ("even", 2, (1, 1, 4), False),
    ("odd_length", 3, (4, 1, 1), True),
    ("even", 3, (2, 1, 2), True),
    ("odd_heads", 3, (1, 1, 4), False),
]
PRODUCT = [
    (case, stage, mesh, late)
    for case, stage, mesh, late in itertools.product(CASES, (1, 2, 3), MESHES, (False, True))
    if (stage == 3 or not late) and (case, stage, mesh, late) not in SELECTED
]


@pytest.mark.parametrize(
    ("case", "stage", "mesh", "late"),
    [*SELECTED, *(pytest.param(*parameters, marks=pytest.mark.full) for parameters in PRODUCT)],
)
def test_same_training_as_on_one_device(ranks: Ranks, case: str, stage: int, mesh: Mesh, late: bool) -> None:
    expected = on_one_device(ranks(1), case, torch.float64)
    for got in ranks(4).run(fit, case, torch.float64, stage, mesh, late):
        check(got, expected, gradients=1e-6, parameters=1e-6)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_float32_as_the_model_stands(ranks: Ranks, stage: int) -> None:
    expected = on_one_device(ranks(1), "odd_length", torch.float32)
    for got in ranks(4).run(fit, "odd_length", torch.float32, stage, (1, 1, 4)):
        check(got, expected, gradients=1e-5, parameters=1e-5)


def test_the_cases_are_clipped(ranks: Ranks) -> None:
    for case in ("odd_heads", "odd_length"):
        for gradients in on_one_device(ranks(1), case, torch.float64)[1]:
            assert torch.stack([g.norm() for g in gradients.values()]).norm() > 1.5 * CLIP
