"""A clock that goes by what a GPU was measured to take, shape by shape, with the noise that was measured.

The measurements are those of `benchmarks/cost/step_time_fit.py`. A shape between the measured ones takes what the fit
to all of them says, times what the nearest one took over its fit. So the clock follows no formula that a fit finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_videoscale.cost import StepTimeModel
from lightning_videoscale.cost.points import Points
from lightning_videoscale.cost.weighted_fit import fit_step_time

MEASURED = Path(__file__).parents[1] / "results" / "cost/step_time_fit-h200.json"


@dataclass(frozen=True)
class ReplayedCosts:
    """Measured seconds of micro-batches.

    Attributes:
        points: What was measured: the lower quartile of the repeats of every shape.
        spreads: (slowest - fastest) over that quartile, (points,).
    """

    points: Points
    spreads: NDArray[np.float64]

    @classmethod
    def load(cls, file: Path = MEASURED) -> ReplayedCosts:
        """Reads the result of the benchmark."""
        return cls.of_rows(json.loads(file.read_text())["rows"])

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> ReplayedCosts:
        """Takes the rows of a `ShapeMatrix`; those that could not be measured are left out."""
        measured = [row for row in rows if row["outcome"] == "measured"]
        names = ("samples", "sequence_length", "seconds", "spread")
        samples, lengths, seconds, spreads = (np.array([row[name] for row in measured], np.float64) for name in names)
        return cls(Points(samples, lengths, seconds, np.ones_like(seconds)), spreads)

    @cached_property
    def fit(self) -> StepTimeModel:
        """The step-time model that all of the measurements give: what an oracle knows."""
        return fit_step_time(self.points)

    def predict(self, samples: ArrayLike, lengths: ArrayLike) -> NDArray[np.float64]:
        """Seconds of B samples of S tokens on an undisturbed GPU."""
        nearest = self._nearest(samples, lengths)
        of_fit = self.points.seconds / self.fit.predict(self.points.samples, self.points.lengths)
        return self.fit.predict(samples, lengths) * of_fit[nearest]

    def noise(self, samples: ArrayLike, lengths: ArrayLike, draws: np.random.Generator) -> NDArray[np.float64]:
        """Factors of single times, from 1 to 1 + the spread of the nearest shape: what disturbs a step prolongs it."""
        spread = self.spreads[self._nearest(samples, lengths)]
        return 1 + spread * draws.random(spread.shape) ** 2

    def _nearest(self, samples: ArrayLike, lengths: ArrayLike) -> NDArray[np.int64]:
        """Number of the measured shape whose batch size and length differ by the smallest factors."""
        measured = np.log(np.stack(self.points[:2], axis=-1))
        asked = np.log(np.stack([np.asarray(samples, np.float64), np.asarray(lengths, np.float64)], axis=-1))
        return np.asarray(((asked[..., None, :] - measured) ** 2).sum(axis=-1).argmin(axis=-1), np.int64)
