"""One device and many give the same loss, the same gradients and the same trained parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]


class Clips(Dataset[dict[str, Tensor]]):
    """Latents (C, F, H, W) and text; the sequence has F · H/2 · W/2 tokens."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latents = torch.randn(8, 4, *shape, generator=generator, dtype=dtype)
        self.text = torch.randn(8, 5, 16, generator=generator, dtype=dtype)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"latents": self.latents[index], "text": self.text[index]}


class RectifiedFlow(pl.LightningModule):
    """An ordinary training module: no line about sequence parallelism."""

    def __init__(self, per_token_timesteps: bool, checkpointing: bool, **config: Any) -> None:
        super().__init__()
        self.transformer = tiny_wan(**config)
        self.per_token_timesteps = per_token_timesteps
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        x, noise = batch["latents"], torch.randn_like(batch["latents"])
        t = torch.rand(x.shape[0], dtype=x.dtype)
        tokens = x.shape[2] * x.shape[3] // 2 * x.shape[4] // 2
        # Wan 2.2 TI2V gives every token a timestep of its own.
        timestep = t[:, None] * torch.linspace(0.5, 1, tokens, dtype=x.dtype) if self.per_token_timesteps else t
        sigma = t.view(-1, 1, 1, 1, 1)
        velocity = self.transformer((1 - sigma) * x + sigma * noise, timestep * 1000, batch["text"]).sample
        loss = torch.nn.functional.mse_loss(velocity, noise - x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Record(Callback):
    """Keeps every loss and every gradient that reaches the optimizer."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})


def fit(
    dtype: torch.dtype, shape: tuple[int, int, int], batch_size: int, module: dict[str, Any]
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Two optimizer steps of two micro-batches each, under one sequence-parallel group of all ranks."""
    record = Record()
    with lifted_float_casts() if dtype is torch.float64 else nullcontext():
        torch.manual_seed(3)
        trainer = pl.Trainer(
            strategy=SequenceParallelDDPStrategy(),
            accelerator="cpu",
            devices=torch.distributed.get_world_size(),
            precision="64-true" if dtype is torch.float64 else "32-true",
            accumulate_grad_batches=2,
            max_steps=2,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = RectifiedFlow(**module)
        trainer.fit(model, DataLoader(Clips(shape, dtype), batch_size=batch_size))
    return record.losses, record.gradients, {name: p.detach() for name, p in model.named_parameters()}


CASES = {
    "even": ((2, 4, 4), 2, {"checkpointing": False, "per_token_timesteps": False}),
    "checkpointing": ((2, 4, 4), 2, {"checkpointing": True, "per_token_timesteps": False}),
    "odd_length": ((3, 6, 10), 1, {"checkpointing": False, "per_token_timesteps": False}),
    "odd_heads": ((1, 4, 6), 2, {"checkpointing": True, "per_token_timesteps": True, "num_attention_heads": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_training_on_one_two_and_four_ranks(ranks: Ranks, case: str) -> None:
    losses, gradients, parameters = ranks(1).run(fit, torch.float64, *CASES[case])[0]
    assert len(losses) == 4
    assert len(gradients) == 2
    for size in (2, 4):
        for got_losses, got_gradients, got_parameters in ranks(size).run(fit, torch.float64, *CASES[case]):
            assert got_losses == pytest.approx(losses, rel=1e-10)
            for got, expected in zip(got_gradients, gradients, strict=True):
                assert gradient_error(got, expected) <= 1e-10
            assert gradient_error(got_parameters, parameters) <= 1e-10


def test_float32_as_the_model_stands(ranks: Ranks) -> None:
    shape, batch_size, module = CASES["odd_length"]
    losses, gradients, _ = ranks(1).run(fit, torch.float32, shape, batch_size, module)[0]
    for size in (2, 4):
        for got_losses, got_gradients, _ in ranks(size).run(fit, torch.float32, shape, batch_size, module):
            assert got_losses == pytest.approx(losses, rel=1e-5)
            # The first step only: AdamW turns the rounding of near-zero gradients into whole steps of the weights.
            assert gradient_error(got_gradients[0], gradients[0]) <= 1e-5


def test_the_gradient_rule_can_be_seen_to_matter() -> None:
    """The comparison used above notices a gradient that is off by the number of ranks, or one in a thousand."""
    reference = {"a": torch.ones(3, dtype=torch.float64), "b": torch.full((2,), 1e-9, dtype=torch.float64)}
    for factor, name in itertools.product((2.0, 1.001), "a"):
        assert gradient_error(reference | {name: reference[name] * factor}, reference) > 1e-4
