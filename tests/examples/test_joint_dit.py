"""A model of one's own: the example trains under every strategy, and the code of its page runs."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from examples.joint_dit import JointRectifiedFlow, Waves
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.examples.conftest import EXAMPLES
from tests.newcomer import commands

PAGE = EXAMPLES.parent / "docs" / "your-model.md"


@pytest.mark.full
def test_the_script_trains_in_two_processes(run_example: Any) -> None:
    (command,) = commands(PAGE.read_text())
    python, script, *arguments = command.split()
    assert (python, script) == ("python", "examples/joint_dit.py")
    assert "3/3" in run_example("joint_dit.py", *arguments, "--accelerator", "cpu", "--steps", 3)


def losses(strategy: str) -> list[float]:
    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
            found.append(float(outputs["loss"]))

    found: list[float] = []
    torch.manual_seed(0)
    with deepspeed_on_cpu():
        pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_steps=3,
            callbacks=[Losses()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(JointRectifiedFlow(), DataLoader(Waves(), batch_size=None))
    return found


@needs_deepspeed
def test_every_strategy_trains_alike(ranks: Any) -> None:
    names = ["ulysses_ddp", "usp_ddp", "ulysses_fsdp2", "ulysses_deepspeed_stage_3"]
    first, *others = [ranks(2).run(losses, name)[0] for name in names]
    assert len(first) == 3
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)


def run_page(page: Path) -> None:
    code: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, code)


def test_the_code_of_the_page_runs(ranks: Any) -> None:
    ranks(2).run(run_page, PAGE)
