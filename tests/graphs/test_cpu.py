"""Where graphs are used; on a machine without a GPU, networks run as without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.graphs import GraphedNetwork, GraphOptions
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from lightning_videoscale.report.sections import setup
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed


def train(strategy: Any, *callbacks: pl.Callback) -> RectifiedFlow:
    module = RectifiedFlow(num_layers=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy,
        max_steps=4,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1))
    assert trainer.global_step == 4
    return module


def test_a_network_on_cpus_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    strategy = SequenceParallelDDPStrategy(ulysses_size=1, graphs=True)
    module = train(strategy, RunReport(tmp_path, every_n_steps=2))
    assert "WanTransformer3DModel runs without CUDA graphs" in caplog.text
    assert "forward" not in vars(module.transformer)  # taken back
    counts = read_run(tmp_path).last("graphs")
    assert counts is not None and (counts["eager"], counts["bytes"]) == (4, 0)
    figures = dict(setup(Findings(read_run(tmp_path))))["CUDA graphs"]
    assert figures["forward passes by graph"] == "0.0\N{NO-BREAK SPACE}% of 4"


def test_by_default_cpus_hear_nothing_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strategy = SequenceParallelDDPStrategy(ulysses_size=1)
    train(strategy)
    assert strategy.graph_mode is False
    assert "graph" not in caplog.text


@pytest.mark.parametrize(
    ("device", "compiled", "mode"), [("cuda", False, "auto"), ("cuda", True, False), ("cpu", False, False)]
)
def test_auto_is_for_gpus_and_blocks_that_are_not_compiled(device: str, compiled: bool, mode: Any) -> None:
    settings = SequenceParallelSettings(None, None, None, None, False, compile=compiled, graphs=GraphOptions("auto"))
    assert settings.graphs_on(torch.device(device)).mode == mode


def test_what_the_user_asks_for_is_left_as_it_is() -> None:
    settings = SequenceParallelSettings(None, None, None, None, False, compile=True, graphs=GraphOptions(True, 0.2))
    assert settings.graphs_on(torch.device("cuda")) == GraphOptions(True, 0.2)


def test_no_graphs_where_parameters_move() -> None:
    with pytest.raises(ValueError, match="graphs=True cannot hold under SequenceParallelFSDP2Strategy"):
        SequenceParallelFSDP2Strategy(graphs=True)
    trainer = pl.Trainer(accelerator="cpu", strategy=SequenceParallelFSDP2Strategy(graphs="auto"), logger=False)
    assert isinstance(trainer.strategy, SequenceParallelFSDP2Strategy)
    assert trainer.strategy.steps_until_graphs == 0


@pytest.mark.parametrize("strategy", [SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy])
@pytest.mark.parametrize("mode", ["always", 1, None])
def test_another_mode_is_refused_by_all_strategies(strategy: Callable[..., Any], mode: Any) -> None:
    with pytest.raises(ValueError, match=rf"graphs={mode!r}.*True, False.*auto"):
        strategy(graphs=mode)


def zero_on_cpu() -> tuple[bool, int]:
    with deepspeed_on_cpu():
        with pytest.raises(ValueError, match="graphs=True cannot hold under ZeRO stage 3"):
            SequenceParallelDeepSpeedStrategy(stage=3, graphs=True)
        off = SequenceParallelDeepSpeedStrategy(stage=3, graphs="auto")
        off.parallel_devices = [torch.device("cuda", 0)] * 2
        strategy = SequenceParallelDeepSpeedStrategy(stage=2, ulysses_size=2, graphs=True)
        counts: dict[str, int] = {}

        class Count(pl.Callback):
            def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                counts.update(strategy.describe_graphs())

        train(strategy, Count())
        return off.steps_until_graphs == 0, counts["eager"]


@needs_deepspeed
def test_zero_keeps_parameters_in_place_in_stages_1_and_2(ranks: Callable[[int], ProcessPool]) -> None:
    assert ranks(2).run(zero_on_cpu) == [(True, 4)] * 2


class Positions(nn.Linear):
    """Makes its tokens itself, of a length."""

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.ones(length, self.in_features))


def test_a_network_that_is_given_no_tensor_runs_eagerly_and_says_so() -> None:
    log: list[str] = []
    network = Positions(2, 3)
    runs = GraphedNetwork(
        network, network.forward, [], GraphOptions(True), None, lambda: 0, lambda: 0, True, log.append
    )
    assert [runs(length).shape[0] for length in (4, 4, 4)] == [4, 4, 4]
    assert runs.counts == {"eager": 3}
    assert len(log) == 1 and "Positions" in log[0] and "tensor" in log[0]
