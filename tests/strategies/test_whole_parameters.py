"""Networks of sharded parameters are saved as any other, by their own methods or within `whole_parameters`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import Strategy
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.failures.rendezvous import Rendezvous
from tests.distributed.parity import SGDFlow
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Adapted(RectifiedFlow):
    """Trains an adapter of diffusers' way, of peft's way, or the network itself."""

    def __init__(self, adapter: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
        if adapter == "diffusers":
            self.transformer.requires_grad_(False)
            self.transformer.add_adapter(config)
        elif adapter == "peft":
            self.transformer = peft.get_peft_model(self.transformer, config)


def zero3() -> SequenceParallelDeepSpeedStrategy:
    return SequenceParallelDeepSpeedStrategy(stage=3)


def save_after_fit(
    strategy: Callable[..., Strategy], adapter: str | None, folder: Path, accelerator: str = "cpu"
) -> dict[str, Tensor]:
    """Returns the weights by the names that one device gives them."""
    module = Adapted(adapter)
    with deepspeed_on_cpu() if accelerator == "cpu" else nullcontext():
        runner = trainer(strategy(), accelerator=accelerator)
        runner.fit(module, clips())
        save = module.transformer.save_lora_adapter if adapter == "diffusers" else module.transformer.save_pretrained
        save(folder)
    assert isinstance(module.transformer, FSDPModule) == (strategy is fsdp2 and adapter != "peft"), "sharded as before"
    return {name: x.detach().cpu().clone() for name, x in module.state_dict().items()}


def load_saved(adapter: str | None, folder: Path) -> dict[str, Tensor]:
    """The state of a new module that loads what was saved, as a user would."""
    module = RectifiedFlow()
    if adapter == "diffusers":
        module.transformer.load_lora_adapter(
            folder, prefix=None, weight_name="pytorch_lora_weights.safetensors", adapter_name="default"
        )
    elif adapter == "peft":
        module.transformer = peft.PeftModel.from_pretrained(module.transformer, folder)
    else:
        module.transformer = WanTransformer3DModel.from_pretrained(folder)
        assert '"WanTransformer3DModel"' in (folder / "config.json").read_text(), "not FSDP2's class"
    return module.state_dict()


@pytest.mark.parametrize(
    ("strategy", "adapter"),
    [
        (fsdp2, "diffusers"),
        pytest.param(fsdp2, None, marks=pytest.mark.full),
        pytest.param(zero3, "peft", marks=[needs_deepspeed, pytest.mark.full]),
        pytest.param(zero3, None, marks=needs_deepspeed),
        pytest.param(fsdp2, "peft", marks=pytest.mark.full),
        pytest.param(zero3, "diffusers", marks=[needs_deepspeed, pytest.mark.full]),
    ],
)
def test_networks_save_themselves_after_fit(
    ranks: Ranks, tmp_path: Path, adapter: str | None, strategy: Callable[..., Strategy]
) -> None:
    expected = ranks(1).run(save_after_fit, ddp, adapter, tmp_path / "ddp")[0]
    ranks(2).run(save_after_fit, strategy, adapter, tmp_path / "sharded")
    for folder in (tmp_path / "ddp", tmp_path / "sharded"):
        loaded = load_saved(adapter, folder)
        assert loaded.keys() == expected.keys()
        for name, value in loaded.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5 if folder.name == "sharded" else 0)


# -- the block -----------------------------------------------------------------------------------------------------


class SaveInTraining(pl.Callback):
    """Saves an adapter after every step, as diffusers' training scripts do, and says what else is seen meanwhile."""

    def __init__(self, file: Path) -> None:
        self.file, self.seen = file, set[str]()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        network = pl_module.transformer
        before = type(network)
        with trainer.strategy.whole_parameters(network):
            network.save_lora_adapter(self.file.parent / "adapter")  # all ranks may: rank 0 writes
            if trainer.is_global_zero:
                save_file(peft.get_peft_model_state_dict(network), self.file)
                assert type(network) is WanTransformer3DModel
                assert not any(isinstance(p, DTensor) or p.device.type != "cpu" for p in network.parameters())
                try:
                    network(torch.zeros(1, 4, 2, 4, 4), torch.zeros(1), torch.zeros(1, 5, 16))
                except RuntimeError as error:
                    self.seen.add(str(error))
        assert type(network) is before


def save_in_training(strategy: Callable[..., Strategy], folder: Path | None) -> tuple[dict[str, Tensor], set[str]]:
    module, callbacks = Adapted("diffusers"), []
    if folder is not None:
        callbacks = [SaveInTraining(folder / "lora.safetensors")]
    trainer(strategy(), callbacks=callbacks).fit(module, clips())
    state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in module.state_dict().items()}
    return {name: x for name, x in state.items() if "lora" in name}, callbacks[0].seen if callbacks else set()


def test_whole_parameters_in_training_leave_it_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    expected, _ = ranks(2).run(save_in_training, fsdp2, None)[0]
    (trained, seen), _ = ranks(2).run(save_in_training, fsdp2, tmp_path)
    assert trained.keys() == expected.keys() and all(torch.equal(trained[name], expected[name]) for name in expected)
    saved = {
        name.replace(".weight", ".default.weight"): x for name, x in load_file(tmp_path / "lora.safetensors").items()
    }
    assert {f"transformer.{name}" for name in saved} == trained.keys()
    assert all(torch.equal(x, trained[f"transformer.{name}"]) for name, x in saved.items())
    assert (tmp_path / "adapter" / "pytorch_lora_weights.safetensors").exists()
    (message,) = seen
    assert "whole_parameters" in message and "all ranks" in message


def fail_within(strategy: Callable[..., Strategy]) -> list[str]:
    module = RectifiedFlow()
    runner = trainer(strategy(timeout=timedelta(seconds=3)), max_steps=1)
    runner.fit(module, clips())
    messages = []
    try:
        with runner.strategy.whole_parameters(module):
            if runner.is_global_zero:
                raise OSError("No space left on device")
    except (OSError, RuntimeError) as error:
        messages.append(str(error))
    assert isinstance(module.transformer, FSDPModule) == (strategy is fsdp2)
    if runner.is_global_zero:  # what rank 0 should not do
        begin = time.monotonic()
        try:
            with runner.strategy.whole_parameters(module):
                raise AssertionError("nobody else came")
        except RuntimeError as error:
            messages.append(str(error))
        assert 3 <= time.monotonic() - begin < 10
    return messages


@pytest.mark.parametrize("strategy", [fsdp2, ddp])
def test_an_error_within_is_that_of_all_ranks_and_a_missing_rank_is_named(
    ranks: Ranks, strategy: Callable[..., Strategy]
) -> None:
    (own, missing), (others,) = ranks(2).run(fail_within, strategy)
    assert own == "No space left on device"
    assert "rank 0" in others and own in others
    assert "rank(s) [1]" in missing and "3 s" in missing and "is_global_zero" in missing


class SlowToSay:
    """A store through which an error comes late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "set":
            time.sleep(0.3)
        return getattr(self._store, name)


def fail_slowly() -> str:
    rendezvous = Rendezvous("a call", timedelta(seconds=20))
    rendezvous._store = SlowToSay(rendezvous._store)  # type: ignore[assignment]
    try:
        rendezvous.wait(OSError("No space left on device") if dist.get_rank() == 0 else None)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_with_an_error_is_not_there_before_the_error_is(ranks: Ranks) -> None:
    mine, others = ranks(2).run(fail_slowly)
    assert mine == "no error"  # but its own, which it raises itself
    assert others == "rank 0 failed in a call: OSError: No space left on device"


def prune(strategy: Callable[..., Strategy], rewind: bool = True, **settings: Any) -> str | dict[str, Tensor]:
    """What is said against pruning, or the weights after an epoch that was trained with half of them."""
    half = ModelPruning("l1_unstructured", amount=0.5, parameter_names=["weight"], use_lottery_ticket_hypothesis=rewind)
    limits: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 2}
    module = SGDFlow()
    with deepspeed_on_cpu():
        runner = trainer(strategy(**settings), callbacks=[half], use_distributed_sampler=False, **limits)
        try:
            runner.fit(module, clips())
        except ValueError as error:
            return str(error)
        with runner.strategy.whole_parameters(module):
            return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("rewind", [False, True])
def test_lightnings_pruning_needs_whole_parameters(ranks: Ranks, rewind: bool) -> None:
    (expected,) = ranks(1).run(prune, ddp, rewind)
    assert (expected["transformer.blocks.0.ffn.net.2.weight"] == 0).float().mean() > 0.3
    for parameters in ranks(2).run(prune, ddp, rewind):
        assert gradient_error(parameters, expected) < 1e-4
    for message in ranks(2).run(prune, fsdp2, rewind):
        assert "['ModelPruning']" in message and "SequenceParallelFSDP2Strategy" in message and "ulysses_ddp" in message


@needs_deepspeed
def test_deepspeed_prunes_what_is_whole_but_sets_no_weights_back(ranks: Ranks) -> None:
    (expected,) = ranks(1).run(prune, ddp, False)
    parameters = ranks(2).run(prune, SequenceParallelDeepSpeedStrategy, False, stage=2)[0]
    assert gradient_error(parameters, expected) < 1e-4
    for message in ranks(2).run(prune, SequenceParallelDeepSpeedStrategy, stage=2):
        assert "['ModelPruning']" in message and "use_lottery_ticket_hypothesis=False" in message
    for message in ranks(2).run(prune, SequenceParallelDeepSpeedStrategy, False, stage=3):
        assert "['ModelPruning']" in message and "SequenceParallelDeepSpeedStrategy" in message


SAVE_ON_RANK_0 = """
import sys
from pathlib import Path
from tests.distributed.wan_training import RectifiedFlow
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, trainer

module, runner = RectifiedFlow(), trainer("ulysses_fsdp2", devices=2)
runner.fit(module, clips())
if runner.is_global_zero:
    module.transformer.save_pretrained(sys.argv[1])
"""


@pytest.mark.full
def test_saving_on_rank_0_alone_is_an_error_at_once(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(SAVE_ON_RANK_0)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "wan")],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank(s) [1] ended without it" in done.stderr and "is_global_zero" in done.stderr
