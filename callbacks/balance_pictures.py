"""Pictures of the balance: who worked and who waited in which step, and how CV_step is distributed.

They are drawn by matplotlib's objects on a canvas of their own; `pyplot` and its figures are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_videoscale.callbacks.step_window import RankTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BalancePictures:
    """Collects steps and draws them.

    Args:
        every_n_steps: Steps of a picture.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps = every_n_steps
        self._windows: list[RankTimes] = []
        self._step = 0

    def add(self, window: RankTimes, step: int) -> None:
        """Adds steps of all ranks.

        Args:
            window: The steps.
            step: The number of the last of them.
        """
        self._windows.append(window)
        self._step = step

    @property
    def are_due(self) -> bool:
        """Whether there are enough steps."""
        return sum(len(window.micro_batches) for window in self._windows) >= self._every_n_steps

    def hand_to(self, loggers: Iterable[Any]) -> None:
        """Draws the steps since the last picture for the loggers that take figures, such as TensorBoard's."""
        windows, self._windows = self._windows, []
        takers = [logger for logger in loggers if hasattr(getattr(logger, "experiment", None), "add_figure")]
        if not windows or not takers:
            return
        compute, wait = (_per_step(windows, phase) for phase in ("compute", "wait"))
        spreads = torch.cat([_spreads(window) for window in windows])
        for taker in takers:
            taker.experiment.add_figure("balance/ranks", draw_ranks(compute, wait, self._step), self._step)
            taker.experiment.add_figure("balance/cv_step_histogram", draw_histogram(spreads), self._step)


def _per_step(windows: list[RankTimes], phase: str) -> Tensor:
    return torch.cat([window.per_step(window.part(phase)) for window in windows], dim=1)


def _spreads(window: RankTimes) -> Tensor:
    compute = window.per_step(window.of_slowest_peers(window.part("compute")))
    return (compute.amax(dim=0) - compute.amin(dim=0)) / compute.amax(dim=0)


def draw_ranks(compute: Tensor, wait: Tensor, last_step: int) -> Figure:
    """Draws a map with a row for every rank and a column for every step, of compute and of waiting time.

    Args:
        compute: Seconds, (ranks, steps).
        wait: Likewise.
        last_step: Number of the last step.
    """
    ranks, steps = compute.shape
    figure = _figure(11, min(9.0, max(2.6, 1.6 + 0.22 * ranks)))
    extent = (last_step - steps + 0.5, last_step + 0.5, ranks - 0.5, -0.5)
    panels = {"compute": (compute, "Blues", None), "wait for others": (wait, "Oranges", 0.0)}
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, (seconds, colors, least)) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(
            seconds.numpy(), cmap=colors, vmin=least, aspect="auto", interpolation="nearest", extent=extent
        )
        axis.set_title(f"{title}, seconds per step", fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.locator_params(integer=True, min_n_ticks=1)
        figure.colorbar(image, ax=axis)
    axes[0].set_ylabel("rank")
    return figure


def draw_histogram(spreads: Tensor) -> Figure:
    """Draws how often which CV_step occurred.

    Args:
        spreads: CV_step of every step, (steps,).
    """
    figure = _figure(6, 3.2)
    axis = figure.subplots()
    percent, median = (spreads * 100).numpy(), float(spreads.median()) * 100
    axis.hist(percent, bins=min(40, max(8, len(percent) // 5)), color="#4878a8")
    axis.axvline(median, color="#c0504d", linewidth=1.5)
    axis.set_title(f"CV_step over {len(percent)} steps, median {median:.1f} %", fontsize=10)
    axis.set_xlabel("(max - min) / max of the ranks' compute times, %")
    axis.set_ylabel("steps")
    axis.locator_params(axis="y", integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
