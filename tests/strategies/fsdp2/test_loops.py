"""All loops of a Trainer under `ulysses_fsdp2`, one after the other and resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow, all_assembled
from tests.models import gradient_error, lifted_float_casts, tiny_wan
from tests.strategies.fsdp2.training import Everything, clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


def run_all_loops(strategy: Callable[..., Strategy], settings: dict[str, Any]) -> list[float]:
    """Sanity check, training, validation inside and outside of fit, test, prediction, and training on."""
    module, loader = RectifiedFlow(), clips(torch.float64)
    values: list[float] = []
    with lifted_float_casts():
        runner = trainer(strategy(**settings), plugins=[DoublePrecision()], limit_val_batches=2, val_check_interval=1)
        runner.fit(module, loader, clips(torch.float64))
        mesh = runner.strategy.mesh
        values.append(float(runner.callback_metrics["val_loss"]))
        values.append(runner.validate(module, loader, verbose=False)[0]["val_loss"])
        values.append(runner.test(module, loader, verbose=False)[0]["test_loss"])
        predicted = runner.predict(module, loader)
        values += [float(value) for value in predicted]
        runner.fit_loop.epoch_loop.max_steps = 4
        runner.fit(module, loader)
        values.append(float(runner.callback_metrics["loss"]))
    assert runner.strategy.mesh is mesh, "copies of the network hold it"
    return values


def test_all_loops_one_after_the_other(ranks: Ranks) -> None:
    expected = ranks(1).run(run_all_loops, ddp, {})[0]
    assert len(expected) > 10
    for values in ranks(2).run(run_all_loops, fsdp2, {"activation_checkpointing": True}):
        assert values == pytest.approx(expected, rel=1e-10)


def train_and_resume(folder: str, meta: bool) -> list[dict[str, Tensor]]:
    def run(steps: int, ckpt_path: str | None = None, meta: bool = False) -> tuple[pl.Trainer, dict[str, Tensor]]:
        with torch.device("meta") if meta else nullcontext():
            module = Everything()
        if meta:  # its buffers are not part of a checkpoint
            module.transformer.rope = tiny_wan().rope
        runner = trainer(fsdp2(), max_steps=steps, precision="bf16-mixed")
        one_clip = DataLoader(Clips((2, 4, 4), torch.float32, length=1))  # whatever the order, every step sees the same
        runner.fit(module, one_clip, ckpt_path=ckpt_path)
        return runner, all_assembled(module.named_parameters())

    _, straight = run(4)
    stopped, _ = run(2)
    path = str(Path(folder) / "stopped.ckpt")
    stopped.save_checkpoint(path)
    _, resumed = run(4, path, meta)
    return [straight, resumed]


@pytest.mark.parametrize("meta", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(ranks: Ranks, tmp_path: Path, meta: bool) -> None:
    for straight, resumed in ranks(2).run(train_and_resume, str(tmp_path), meta):
        for name, parameter in straight.items():
            assert torch.equal(resumed[name], parameter), name


class SamplingBefore(RectifiedFlow):
    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self._mode = mode

    def on_fit_start(self) -> None:
        with self._mode():
            self.loss(next(iter(clips())))


def sample_before_the_first_step() -> tuple[str, int]:
    runner = trainer(fsdp2())
    runner.fit(SamplingBefore(torch.no_grad), clips())
    try:
        trainer(fsdp2()).fit(SamplingBefore(torch.inference_mode), clips())
    except RuntimeError as error:
        return str(error), runner.global_step
    return "no error", runner.global_step


def test_sampling_in_inference_mode_before_the_first_step_says_what_to_do(ranks: Ranks) -> None:
    for message, steps in ranks(2).run(sample_before_the_first_step):
        assert message.startswith("transformer ") and "no_grad" in message and steps == 2


class Interrupted(RectifiedFlow):
    """Raises once, in the second step: in the step itself, or in its backward."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward, self.raised = in_backward, False
        self.scale = nn.Parameter(torch.ones(1))
        self.transformer.blocks[1].register_forward_hook(self.fail_after)

    def fail_after(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.in_backward:
            output.register_hook(self.fail)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().training_step(batch) * self.scale.sum()
        if not self.in_backward:
            self.fail()
        return loss

    def fail(self, _: Tensor | None = None) -> None:
        if self.trainer.global_step == 1 and not self.raised:
            self.raised = True
            raise ArithmeticError("interrupted")


def fit_again(strategy: Callable[..., Strategy], in_backward: bool) -> tuple[bool, dict[str, Tensor]]:
    module = Interrupted(in_backward)
    with lifted_float_casts():
        runner = trainer(strategy(), plugins=[DoublePrecision()], max_steps=3)
        with pytest.raises(ArithmeticError):
            runner.fit(module, clips(torch.float64))
        runner.fit(module, clips(torch.float64))
    return module.raised and runner.global_step == 3, all_assembled(module.named_parameters())


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_fit_after_an_exception_trains_as_under_ddp(ranks: Ranks, in_backward: bool) -> None:
    (_, expected), (done, got) = (ranks(1).run(fit_again, strategy, in_backward)[0] for strategy in (ddp, fsdp2))
    assert done and gradient_error(got, expected) <= 1e-10
