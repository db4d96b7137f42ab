"""What sends users elsewhere names what is ours, and what it names works."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn

import lightning_videoscale as vs
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow, assembled
from tests.strategies.fsdp2.training import clips, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


# -- torchrun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("restarts", "shares", "warned"), [("1", "True", 1), ("1", "False", 0), ("0", "True", 0)])
def test_ranks_that_torchrun_starts_again_are_told_what_they_need(
    monkeypatch: pytest.MonkeyPatch, restarts: str, shares: str, warned: int
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(strategy="ulysses_ddp", accelerator="cpu", devices=1, logger=False)
    assert sum("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(each.message) for each in caught) == warned


# -- parameters that not every loss uses ---------------------------------------------------------------------------


class PartlyUsed(RectifiedFlow):
    """One of two heads trains in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch) * self.heads[batch_idx % 2].weight.sum()


def fit_partly_used(strategy: str) -> str:
    module = PartlyUsed()
    before = [head.weight.detach().clone() for head in module.heads]
    try:
        trainer(strategy).fit(module, clips())
    except RuntimeError as error:
        return str(error)
    assert all(not torch.equal(head.weight, old) for head, old in zip(module.heads, before, strict=True))
    return "trained"


@pytest.mark.parametrize("name", ["ulysses_ddp", "usp_ddp"])
def test_unused_parameters_are_named_with_the_strategy_that_takes_them(ranks: Ranks, name: str) -> None:
    message = ranks(2).run(fit_partly_used, name)[0]
    assert f'"{name}_find_unused_parameters_true"' in message and "heads.1.weight" in message
    assert ranks(2).run(fit_partly_used, f"{name}_find_unused_parameters_true") == ["trained"] * 2


def fit_a_static_graph() -> str:
    try:
        trainer(vs.SequenceParallelDDPStrategy(static_graph=True), accumulate_grad_batches=2).fit(
            RectifiedFlow(), clips()
        )
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_a_static_graph_beside_accumulation_is_named(ranks: Ranks) -> None:
    assert "leave static_graph=True out, or accumulate_grad_batches" in ranks(2).run(fit_a_static_graph)[0]


class Adversarial(RectifiedFlow):
    """Two optimizers take turns, and each step freezes what is not the optimizer's for a while."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Tensor]) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.loss, self.judge), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def judge(self, batch: dict[str, Tensor]) -> Tensor:
        return self.critic(batch["time"][:, None]).square().mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.transformer, self.critic)]


def fit_adversarially() -> str:
    try:
        trainer("ulysses_ddp").fit(Adversarial(), clips())
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_unused_parameters_are_named_where_optimizers_take_turns(ranks: Ranks) -> None:
    message = ranks(2).run(fit_adversarially)[0]
    assert "critic.weight, critic.bias" in message and '"ulysses_ddp_find_unused_parameters_true"' in message


# -- notebooks -----------------------------------------------------------------------------------------------------

NOTEBOOK = """
import sys
sys.ps1 = ">>> "  # by which Lightning knows a prompt
import torch
import lightning_videoscale
from tests.distributed.wan_training import RectifiedFlow
from tests.strategies.fsdp2.training import clips, trainer

for name in ("ulysses_ddp", "usp_ddp", "ulysses_fsdp2"):
    try:
        trainer(name, devices=2)
    except ValueError as error:
        print("refused:", error)
module = RectifiedFlow()
before = module.transformer.proj_out.weight.detach().clone()
runner = trainer("usp_ddp_notebook", devices=2)
runner.fit(module, clips())
print("steps:", runner.callback_metrics["loss"].item() > 0, torch.equal(module.transformer.proj_out.weight, before))
"""


@pytest.mark.full  # a process that imports everything anew
def test_notebooks_fork_their_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert all(
        f'"{name}_ddp_notebook"' in text for name, text in zip(("ulysses", "usp", "ulysses"), refused, strict=True)
    )
    assert done.stdout.count("steps: True False") == 1
    assert "dp=1, ring=2, ulysses=1" in done.stderr


# -- precision -----------------------------------------------------------------------------------------------------


def fit_in_float64(by_name: bool) -> tuple[torch.dtype, Tensor]:
    module = RectifiedFlow()
    strategy: Strategy | str = "ulysses_fsdp2" if by_name else fsdp2()
    trainer(strategy, precision="64-true", max_steps=1).fit(module, clips())
    weight = assembled(module.transformer.proj_out.weight)
    return weight.dtype, weight


def test_a_strategy_object_takes_the_precisions_that_its_name_takes(ranks: Ranks) -> None:
    (dtype, weight), (_, by_name) = (ranks(2).run(fit_in_float64, by_name)[0] for by_name in (False, True))
    assert dtype == torch.float64 and torch.equal(weight, by_name)


@pytest.mark.parametrize(
    ("strategy", "precision", "supported"),
    [
        ("ulysses_fsdp2", "16-true", "32-true, bf16-mixed, bf16-true, 64-true"),
        (vs.SequenceParallelFSDP2Strategy, "16-true", "32-true, bf16-mixed, bf16-true, 64-true"),
        ("ulysses_deepspeed_stage_2", "64-true", "ulysses_fsdp2"),
    ],
)
def test_refused_precisions_come_with_ours(strategy: Any, precision: Any, supported: str) -> None:
    if strategy == "ulysses_deepspeed_stage_2":
        pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match=f"SequenceParallel.* precision='{precision}'") as error:
        trainer(strategy if isinstance(strategy, str) else strategy(), precision=precision)
    assert supported in str(error.value)


def test_other_strategies_keep_lightnings_check() -> None:
    with pytest.raises(ValueError, match=r"ModelParallelStrategy.*64-true"):
        pl.Trainer(strategy=ModelParallelStrategy(), precision="64-true", accelerator="cpu", logger=False)


# -- elsewhere -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ulysses_ddp", "usp_fsdp2", "ulysses_deepspeed_stage_3"])
def test_fabric_is_told_how_to_split_a_model(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*Fabric.*parallel\.parallelize"):
        Fabric(strategy=name, accelerator="cpu")
    with pytest.raises(ValueError, match=r"parallel\.parallelize"):
        Fabric(strategy=vs.SequenceParallelDDPStrategy(), accelerator="cpu")  # type: ignore[arg-type]
