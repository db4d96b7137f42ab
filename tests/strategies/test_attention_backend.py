"""``attention_backend=`` of the strategies: what runs, what is said, what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.attention import choices
from lightning_videoscale.attention.records import SDPA
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.attention.cases import calls_of_math
from tests.distributed.wan_training import RectifiedFlow
from tests.strategies.fsdp2.training import clips, trainer


def fit(folder: Path, backend: Any = "auto", **kwargs: Any) -> SequenceParallelDDPStrategy:
    torch.manual_seed(0)
    strategy = SequenceParallelDDPStrategy(ulysses_size=1, attention_backend=backend)
    fitted = trainer(strategy, default_root_dir=folder, max_steps=kwargs.pop("max_steps", 3))
    fitted.fit(RectifiedFlow(), clips(), **kwargs)
    return strategy


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return calls_of_math(monkeypatch)


def test_a_kernel_by_name_runs_in_training(tmp_path: Path, calls: list[int]) -> None:
    assert fit(tmp_path, "math").describe()["attention"] == "math"
    assert calls


def test_a_kernel_that_cannot_run_here_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"cudnn.*cpu"):
        fit(tmp_path, "cudnn")


def test_auto_measures_after_steps_1_2_4_and_a_checkpoint_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is to choose from, so the kernels to choose from are named."""
    monkeypatch.setattr(choices, "_SHORTEST", 1)
    monkeypatch.setenv("LIGHTNING_VIDEOSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choices.AttentionChoices, "_names", lambda self, device: ["math"])
    settled: list[int] = []
    settle = choices.AttentionChoices.settle

    def counted(self: choices.AttentionChoices) -> None:
        settled.append(strategy._steps_of_run)
        settle(self)

    monkeypatch.setattr(choices.AttentionChoices, "settle", counted)
    strategy = SequenceParallelDDPStrategy(ulysses_size=1, attention_backend="auto")
    run = trainer(strategy, default_root_dir=tmp_path, max_steps=5)
    run.fit(RectifiedFlow(), clips())
    assert settled == [1, 2, 4]
    chosen = strategy.attention_choices.chosen
    assert len(chosen) == 2 and set(chosen.values()) <= {SDPA, "math"}  # self- and cross-attention
    run.save_checkpoint(tmp_path / "checkpoint")
    kept = strategy.load_checkpoint(tmp_path / "checkpoint")["lightning_videoscale"]["attention"]
    assert kept == {"backend": "auto", "chosen": chosen}

    said: list[str] = []
    monkeypatch.setattr("lightning_videoscale.strategies.choices.rank_zero_info", said.append)
    fit(tmp_path, "math", max_steps=6, ckpt_path=tmp_path / "checkpoint")
    assert any("'auto'" in line and "'math'" in line and "checkpoint" in line for line in said)
