"""Says what costs the training the most, and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.run_figures import RunFigures
from lightning_videoscale.report import record
from lightning_videoscale.report.bottlenecks import figure_of, shares_of, straggler_of
from lightning_videoscale.report.judge import advice_on_bottleneck
from lightning_videoscale.timing import StepWindow, check_interval, subscribe_to_steps


class BottleneckAnalyzer(RunFigures):
    """Names the main bottleneck of the last steps: data, exchange, straggler, between, kernels or optimizer.

    Every few optimizer steps it divides the step's time (`StepShares`) and names the largest loss. Where none takes a
    tenth of the step, the work itself is the bottleneck: kernels. Under ``between`` ranks wait for one that is busy
    between steps. Loggers get the shares as ``bottleneck/data`` and so on; the run's report gets the finding; and rank
    0 says it, with the figure and what to try, when it is another one than before.

    The steps are those of the Trainer's one log (`timing.subscribe_to_steps`). Nothing that goes wrong in analysing or
    logging stops the training.

    Attributes:
        history: The findings of the run so far, each with ``step``, ``name``, ``share`` of the step in [0, 1],
            ``figure`` and ``advice`` (sentences), and ``seconds`` per step by name. It is in the checkpoint.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        """Creates the analyzer.

        Args:
            every_n_steps: Optimizer steps that are judged together.

        Raises:
            ValueError: ``every_n_steps`` is below 1.
        """
        self.every_n_steps = check_interval(every_n_steps)
        self.history: list[dict[str, Any]] = []
        self._best_effort = BestEffort("BottleneckAnalyzer")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Subscribes to the steps."""
        subscribe_to_steps(trainer, self.every_n_steps, partial(self._receive, trainer))

    def state_dict(self) -> dict[str, Any]:
        """Returns the findings so far."""
        return {"history": [dict(finding) for finding in self.history]}

    def _begin_anew(self) -> None:
        self.history = []

    def _go_on(self, state_dict: Mapping[str, Any]) -> None:
        self.history = [dict(finding) for finding in state_dict["history"]]

    def _receive(self, trainer: pl.Trainer, window: StepWindow) -> None:
        self._best_effort.attempt("find the bottleneck", self._judge, trainer, window)

    def _judge(self, trainer: pl.Trainer, window: StepWindow) -> None:
        shares, straggler = shares_of(window), straggler_of(window)
        name = shares.bottleneck
        finding = {
            "name": name,
            "share": shares.share(name),
            "figure": figure_of(name, shares, straggler),
            "advice": advice_on_bottleneck(name, straggler, trainer.strategy.root_device.type == "cuda"),
        }
        is_new = not self.history or self.history[-1]["name"] != name
        self.history.append({"step": trainer.global_step, **finding, "seconds": shares._asdict()})
        record(trainer, "bottleneck", finding)
        if is_new:
            slow = f" For the same work it takes {straggler.slowdown:.2f} times as long as a healthy rank."
            said = f"{finding['figure']}{slow if name == 'straggler' else ''} {finding['advice']}"
            rank_zero_info(f"Bottleneck of the last steps: {name}. {said}")
        self._best_effort.log(trainer, {f"bottleneck/{part}": shares.share(part) for part in shares._fields})
