"""Says what costs the training the most, and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_videoscale.callbacks.bottlenecks import StepShares, advice_on, figure_of, shares_of, straggler_of
from lightning_videoscale.callbacks.guard import Guard
from lightning_videoscale.callbacks.step_window import RankTimes, StepWindow, check_interval
from lightning_videoscale.report import record


class BottleneckAnalyzer(pl.Callback):
    """Names the main bottleneck of the last steps: data, exchange, straggler, kernels or optimizer.

    Every few optimizer steps it divides the step's time (`StepShares`) and names the largest loss. Where none takes a
    tenth of the step, the work itself is the bottleneck: kernels. Loggers get the shares as ``bottleneck/data`` and so
    on; the run's report gets the finding; and rank 0 says it, with the figure and what to try, when it is another one
    than before.

    Ranks meet once per finding, in one gather. Nothing that goes wrong in analysing or logging stops the training.

    Attributes:
        history: The findings so far, each with ``step``, ``name``, ``share`` of the step in [0, 1], ``figure`` and
            ``advice`` (sentences), and ``seconds`` per step by name. It is in the checkpoint.
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
        self._guard = Guard("BottleneckAnalyzer")
        self._window: StepWindow | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the first window."""
        self._window = StepWindow(trainer, self.every_n_steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judges when enough optimizer steps are complete."""
        assert self._window is not None
        self._window.add(trainer)
        if self._window.is_full:
            self._judge(trainer, self._window)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judges the steps since the last finding."""
        assert self._window is not None
        if self._window.steps:
            self._judge(trainer, self._window)
        self._window.close()
        self._window = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the findings so far."""
        return {"history": [dict(finding) for finding in self.history]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from them."""
        self.history = [dict(finding) for finding in state_dict["history"]]

    def _judge(self, trainer: pl.Trainer, steps: StepWindow) -> None:
        # Outside of the guard: a rank that skipped it would leave the others waiting.
        window = steps.gather(trainer)
        self._guard.attempt("tell the bottleneck", lambda: self._find(trainer, window))

    def _find(self, trainer: pl.Trainer, window: RankTimes) -> None:
        shares = shares_of(window)
        finding = self._finding(trainer.global_step, shares, window)
        is_new = not self.history or self.history[-1]["name"] != finding["name"]
        self.history.append(finding)
        record(trainer, "bottleneck", {key: finding[key] for key in ("name", "share", "figure", "advice")})
        if is_new:
            rank_zero_info(f"Bottleneck of the last steps: {finding['name']}. {finding['figure']} {finding['advice']}")
        self._guard.log(trainer, {f"bottleneck/{part}": shares.share(part) for part in shares._fields})

    @staticmethod
    def _finding(step: int, shares: StepShares, window: RankTimes) -> dict[str, Any]:
        name, straggler = shares.bottleneck, straggler_of(window)
        return {
            "step": step,
            "name": name,
            "share": shares.share(name),
            "figure": figure_of(name, shares, straggler),
            "advice": advice_on(name, straggler),
            "seconds": shares._asdict(),
        }
