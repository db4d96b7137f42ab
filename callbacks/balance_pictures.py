"""Pictures of the balance: who worked and who waited in which step, and how CV_step is distributed.

They are drawn by matplotlib's objects on a canvas of their own; `pyplot` and its figures are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_videoscale.cost.spread import cv_step
from lightning_videoscale.timing import StepWindow

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BalancePictures:
    """Collects steps and draws a picture of every so many of them."""

    def __init__(self, every_n_steps: int) -> None:
        self._every_n_steps = every_n_steps
        self._compute: list[Tensor] = []
        self._wait: list[Tensor] = []
        self._spreads: list[Tensor] = []
        self._step = 0

    def add(self, window: StepWindow, step: int) -> None:
        """Adds steps of all ranks, up to the one of this number."""
        self._compute.append(window.per_step(window.column("compute")))
        self._wait.append(window.per_step(window.column("wait")))
        self._spreads.append(cv_step(window.work))
        self._step = step

    @property
    def are_due(self) -> bool:
        """Whether there are enough steps."""
        return sum(map(len, self._spreads)) >= self._every_n_steps

    def hand_to(self, loggers: Iterable[Any]) -> None:
        """Draws the steps since the last picture for the loggers that take figures, such as TensorBoard's."""
        compute, wait, spreads = self._compute, self._wait, self._spreads
        self._compute, self._wait, self._spreads = [], [], []
        for logger in loggers if spreads else ():
            experiment = getattr(logger, "experiment", None)
            if experiment is not None and hasattr(experiment, "add_figure"):
                ranks = draw_ranks(torch.cat(compute, dim=1), torch.cat(wait, dim=1), self._step)
                experiment.add_figure("balance/ranks", ranks, self._step)
                experiment.add_figure("balance/cv_step_histogram", draw_histogram(torch.cat(spreads)), self._step)


def draw_ranks(compute: Tensor, wait: Tensor, last_step: int) -> Figure:
    """Draws maps of compute and of waiting seconds, (ranks, steps): a row for every rank, a column for every step."""
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
    """Draws how often which CV_step occurred, of (steps,)."""
    figure = _figure(6, 3.2)
    axis = figure.subplots()
    percent, median = (spreads * 100).numpy(), float(spreads.median()) * 100
    axis.hist(percent, bins=min(40, max(8, len(percent) // 5)), color="#4878a8")
    axis.axvline(median, color="#c0504d", linewidth=1.5)
    axis.set_title(f"CV_step over {len(percent)} steps, median {median:.1f} %", fontsize=10)
    axis.set_xlabel("(max - min) / max of the ranks' times for their work, %")
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
