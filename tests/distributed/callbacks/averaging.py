"""A run with the callback `EMA`, and beside it an average in float64 of what is trained."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import peft
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import EMA
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    read_weights,
)
from tests.distributed.wan_training import Clips, RectifiedFlow, all_assembled
from tests.distributed.zero import deepspeed_on_cpu
from tests.models import lifted_float_casts

DECAY = 0.75


class Flow(RectifiedFlow):
    """Two parameters that share their values, and one that is frozen; or adapters, which alone are trained."""

    def __init__(self, lora: bool = False, failing: bool = False) -> None:
        super().__init__(num_layers=1)
        self.failing = failing
        if lora:
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
            self.transformer = peft.get_peft_model(self.transformer, config)
        else:
            self.transformer.patch_embedding.bias.requires_grad_(False)
            self.alias = self.transformer.proj_out

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        super().validation_step(batch)
        if self.failing and self.trainer.global_step == 2:
            raise ArithmeticError("the validation fails")


def masters(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the optimizer updates, whole."""
    from deepspeed.utils import safe_get_full_fp32_param

    if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in parameters.values()):
        return {name: safe_get_full_fp32_param(p).double().clone() for name, p in parameters.items()}
    return {name: x.double() for name, x in all_assembled(parameters.items()).items()}


def computed_with(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the network computes with, whole."""
    if not any(hasattr(p, "ds_id") for p in parameters.values()):
        return {name: x.double() for name, x in all_assembled(parameters.items()).items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters([*parameters.values()]):
        return {name: p.detach().double().clone() for name, p in parameters.items()}


class Oracle(Callback):
    """Averages whole weights in float64, and saves a checkpoint after the first epoch; goes behind `EMA`."""

    def __init__(self, half: Path | None = None) -> None:
        self.half = half
        self.average: dict[str, Tensor] = {}
        self.steps = 0
        self.validated_with: list[dict[str, Tensor]] = []
        self.expected: list[dict[str, Tensor]] = []
        self.swapped_back = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        for name, value in masters(trained(module)).items():
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * value if name in self.average else value

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.validated_with.append(computed_with(trained(module)))
        self.expected.append(dict(self.average))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.half is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.half)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.swapped_back &= computes_with_masters(module)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def computes_with_masters(module: nn.Module) -> bool:
    expected, found = masters(trained(module)), computed_with(trained(module))
    return all(torch.equal(x, expected[name]) for name, x in found.items())


def strategy(name: str, sp: int) -> Any:
    if name.startswith("zero"):
        return SequenceParallelDeepSpeedStrategy(int(name[-1]), ulysses_size=sp, verify_plan=False)  # as `Run` does
    return {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}[name](ulysses_size=sp)


def trainer_of(name: str, sp: int, callbacks: list[Callback], contexts: ExitStack, **kwargs: Any) -> pl.Trainer:
    """A Trainer in float64, under ZeRO in float32."""
    on_gpus = dist.get_backend() == "nccl"
    if on_gpus:  # whose other kernels add up in any order
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
    else:
        contexts.enter_context(deepspeed_on_cpu())
    if not name.startswith("zero"):
        contexts.enter_context(lifted_float_casts())
    defaults: dict[str, Any] = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    return pl.Trainer(
        strategy=strategy(name, sp),
        accelerator="gpu" if on_gpus else "cpu",
        devices=dist.get_world_size(),
        plugins=[] if name.startswith("zero") else [DoublePrecision()],
        limit_val_batches=1,
        limit_test_batches=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | kwargs),
    )


def clips(name: str) -> DataLoader[Any]:
    dtype = torch.float32 if name.startswith("zero") else torch.float64
    return DataLoader(Clips((2, 4, 4), dtype, length=4), batch_size=1)


class Outcome(NamedTuple):
    """Largest errors of the average at the end and in validations; whether what is trained came back."""

    average: float
    validation: float
    swapped_back: bool


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((got[name].double().cpu() - value.cpu()).abs().max()) for name, value in expected.items())


def train(name: str, sp: int, folder: Path, lora: bool = False) -> Outcome:
    """Two epochs, to ``end.ckpt``; in between ``half.ckpt``, from which another run goes to ``resumed.ckpt``."""
    oracle = Oracle(folder / "half.ckpt")
    fit(name, sp, Flow(lora), [EMA(DECAY), oracle], 2, folder / "end.ckpt")
    fit(name, sp, Flow(lora), [EMA(DECAY)], 2, folder / "resumed.ckpt", folder / "half.ckpt")
    saved = read_weights(folder / "end.ckpt", averaged=True)
    validation = max(map(difference, oracle.validated_with, oracle.expected))
    return Outcome(difference(saved, oracle.average), validation, oracle.swapped_back)


def fit(
    name: str,
    sp: int,
    module: Flow,
    callbacks: list[Callback],
    epochs: int,
    end: Path,
    start: Path | None = None,
    **kwargs: Any,
) -> pl.Trainer:
    """Trains up to a number of epochs, from a checkpoint to a checkpoint."""
    with ExitStack() as contexts:
        runner = trainer_of(name, sp, callbacks, contexts, max_epochs=epochs, **kwargs)
        torch.manual_seed(3)
        runner.fit(module, clips(name), clips(name), ckpt_path=start)
        runner.save_checkpoint(end)
    return runner


def carry(name: str, start: Path, end: Path, lora: bool = False) -> None:
    """Opens a checkpoint and saves another, without training."""
    fit(name, dist.get_world_size(), Flow(lora), [EMA(DECAY)], 1, end, start)


def fail(name: str, sp: int) -> Outcome:
    """A validation that raises."""
    ema, oracle, module = EMA(DECAY), Oracle(), Flow(failing=True)
    with ExitStack() as contexts:
        runner = trainer_of(name, sp, [ema, oracle], contexts, max_epochs=2)
        try:
            runner.fit(module, clips(name), clips(name))
        except ArithmeticError:
            back = computes_with_masters(module)
    return Outcome(0.0, max(map(difference, oracle.validated_with, oracle.expected)), back)


def use(name: str, folder: Path) -> tuple[float, float, str]:
    """Saves the network with the average after training, and tests with it, also from a checkpoint."""
    ema, oracle, module = EMA(DECAY), Oracle(), Flow()
    with ExitStack() as contexts:
        # Over gloo Lightning does without inference mode, and over NCCL it uses it.
        contexts.enter_context(patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False))
        runner = trainer_of(name, dist.get_world_size(), [ema, oracle], contexts, max_epochs=1)
        runner.fit(module, clips(name), clips(name))
        with ema.average_weights():
            module.transformer.save_pretrained(folder / name)
        runner.save_checkpoint(folder / f"{name}.ckpt")
        validated = float(runner.callback_metrics["val_loss"])
        message = ""
        try:
            (tested,) = runner.test(module, clips(name), verbose=False)
        except RuntimeError as error:
            message = str(error)
            other = trainer_of(name, dist.get_world_size(), [EMA(DECAY)], contexts)
            (tested,) = other.test(Flow(), clips(name), ckpt_path=folder / f"{name}.ckpt", verbose=False)
    saved = WanTransformer3DModel.from_pretrained(folder / name).state_dict()
    expected = {key.removeprefix("transformer."): value for key, value in oracle.average.items()}
    return difference(saved, expected), abs(tested["test_loss"] - validated), message


def refit(first: str, second: str) -> str:
    """What a fit says whose callback holds the averages of one under another strategy."""
    module, ema = Flow(), EMA(DECAY)
    with ExitStack() as contexts:
        trainer_of(first, 1, [ema], contexts, max_epochs=1).fit(module, clips(first))
        try:
            trainer_of(second, 1, [ema], contexts, max_epochs=1).fit(module, clips(second))
        except ValueError as error:
            return str(error)
    return "nothing"
