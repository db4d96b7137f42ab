"""How long a micro-batch takes: the paper's power law, and a sum over tokens, pairs of tokens and samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_videoscale.cost.budget import BucketBudget, plain_numbers
from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.launch_bound import above_floor, floor_of, suffice
from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import Points, Vector, held_out_errors, nonnegative_least_squares

EXPONENTS = np.round(np.arange(1.6, 2.4 + 1e-9, 0.01), 2)
"""Where AdaptiveLoad searches p."""

_LITTLE = 0.5
"""Share of the squared errors of one cost for all, below which a sum has found what costs depend on."""


@dataclass(frozen=True)
class PowerLaw:
    """Seconds = a + b * B * S**p, AdaptiveLoad's model of the step time.

    Attributes:
        a: Seconds that a step takes however small.
        b: Seconds per token to the power p.
        p: The exponent.
        r_squared: Share of the variance that the fit explains.
    """

    a: float
    b: float
    p: float
    r_squared: float

    @classmethod
    def fit(cls, samples: Vector, lengths: Vector, seconds: Vector, exponents: Vector = EXPONENTS) -> PowerLaw:
        """Searches p over ``exponents`` for the highest R²; a and b by least squares, as in the paper."""
        total = float(np.sum((seconds - seconds.mean()) ** 2))
        fits = []
        for p in exponents:
            work = samples * lengths**p
            b = float(np.sum((work - work.mean()) * (seconds - seconds.mean())) / np.sum((work - work.mean()) ** 2))
            a = float(seconds.mean() - b * work.mean())
            residual = float(np.sum((a + b * work - seconds) ** 2))
            fits.append(cls(a, b, float(p), 1.0 - residual / total if total > 0 else 0.0))
        return max(fits, key=lambda fit: fit.r_squared)

    def predict(self, samples: ArrayLike, lengths: ArrayLike) -> Vector:
        """Seconds of B samples of S tokens."""
        return self.a + self.b * np.asarray(samples, np.float64) * np.asarray(lengths, np.float64) ** self.p


@dataclass(frozen=True)
class AdditiveCost:
    """Seconds = a + linear * ΣS + quadratic * ΣS² + per_sample * B, sums over the samples of the micro-batch.

    Linear layers take time by the token, attention by the pair of tokens, and what every sample brings beside its
    tokens, such as the keys and values of its text, by the sample. Fitted on relative errors: on absolute ones the
    longest shapes alone would decide, and short shapes be wrong by half.

    Attributes:
        a: Seconds that a step takes however small.
        linear: Seconds per token.
        quadratic: Seconds per pair of tokens.
        per_sample: Seconds per sample.
    """

    a: float
    linear: float
    quadratic: float
    per_sample: float = 0.0

    @classmethod
    def fit(cls, samples: Vector, lengths: Vector, seconds: Vector, weights: Vector) -> AdditiveCost:
        """Non-negative weighted least squares of (prediction - seconds) / seconds."""
        terms, root = cls.terms(samples, lengths), np.sqrt(weights)
        return cls(*map(float, nonnegative_least_squares(terms * (root / seconds)[:, None], root)))

    def explains(self, points: Points) -> bool:
        """Whether it tells most of how much measured costs differ, on relative errors; of noise it does not."""
        of_one_time = points.weights / points.seconds
        one_time = of_one_time.sum() / (of_one_time / points.seconds).sum()
        spread = points.weights @ (one_time / points.seconds - 1) ** 2
        return bool(points.weights @ points.errors_of(self) ** 2 < _LITTLE * spread)

    @staticmethod
    def terms(samples: Vector, lengths: Vector) -> NDArray[np.float64]:
        """What each coefficient is multiplied by, (points, 4)."""
        return np.stack([np.ones_like(samples), samples * lengths, samples * lengths**2, samples], axis=1)

    def predict(self, samples: ArrayLike, lengths: ArrayLike) -> Vector:
        """Seconds of B samples of S tokens."""
        b, s = np.asarray(samples, np.float64), np.asarray(lengths, np.float64)
        return self.a + b * (self.per_sample + s * (self.linear + self.quadratic * s))


def fit_forms(
    points: Points, fit_law: Callable[[Points], PowerLaw], fit_sum: Callable[[Points], AdditiveCost]
) -> tuple[PowerLaw, AdditiveCost, Vector, Vector]:
    """Fits both forms, and returns their errors at points held out; see `StepTimeModel.fit`."""
    power_law, additive = fit_law(points), fit_sum(points)
    of_power_law, of_sum = held_out_errors(fit_law, points), held_out_errors(fit_sum, points)
    if power_law.b <= 0 and additive.explains(points):
        # On absolute errors the largest micro-batches decide. These have equally many tokens, and those of most
        # samples are the slowest: the law has no cost of samples, and would fall with the length.
        power_law = fit_law(points.alone(additive))
        of_power_law = points.errors_of(power_law)
    return power_law, additive, of_power_law, of_sum


@dataclass(frozen=True)
class StepTimeModel:
    """Predicts how long a micro-batch takes; made from measurements, or from a model's size where there are none.

    The planner uses the form with the smaller error on shapes that its fit has not seen. The power law is kept in any
    case, because equation 2 of the paper needs its p.

    A step takes at least as long as the host needs to launch it, however little the device has to do. That is no
    summand: the device works while the host launches. Times near this floor would bend both forms. Where short steps
    run by CUDA graphs, none of them waits for the host, and there is no floor.

    Attributes:
        power_law: The paper's form.
        additive: Linear and quadratic work apart.
        power_law_error: Median relative error of the power law on shapes held out of the fit.
        additive_error: The same of the additive form.
        floor: Seconds that any step takes at least.
    """

    power_law: PowerLaw
    additive: AdditiveCost
    power_law_error: float
    additive_error: float
    floor: float = 1e-6

    @classmethod
    def fit(cls, samples: Sequence[Measurement]) -> StepTimeModel:
        """Fits both forms to what takes 2 times as long as the shortest step, or 1.5, where enough does; else to all.

        Where some ran by CUDA graphs, it is all too: what waits for the host does run by them. Where the power law
        would fall with the work and the sum tells the times, the law is that of the sum's times of single samples.

        Args:
            samples: Measured shapes, at least 6, of at least 3 sequence lengths.

        Raises:
            ValueError: If there are too few, a time is not positive, or times do not grow with the work.
        """
        b, s, seconds = np.array([m[:3] for m in samples], np.float64).reshape(-1, 3).T
        if not suffice(s):
            raise ValueError(
                f"A step-time model needs at least 6 measurements of 3 sequence lengths; got {len(samples)} of "
                f"{len(np.unique(s))}. Measure more shapes."
            )
        if not (np.isfinite(seconds) & (seconds > 0) & (b >= 1) & (s >= 1)).all():
            raise ValueError("Every measurement needs a positive time, batch size and sequence length.")
        every = Points(b, s, seconds, np.ones_like(seconds))
        above = np.ones_like(s, np.bool_) if any(m.by_graph for m in samples) else above_floor(s, seconds)
        points = every.where(above)
        power_law, additive, of_power_law, of_sum = fit_forms(
            points, lambda those: PowerLaw.fit(*those[:3]), lambda those: AdditiveCost.fit(*those)
        )
        if power_law.b <= 0 or not np.ptp(points.seconds):  # rounded, the slope of equal times may be above zero
            raise _not_growing(power_law)
        errors = (float(np.median(each)) for each in (of_power_law, of_sum))
        model = cls(power_law, additive, *errors)
        if not model.grows_from(points.lengths.min()):
            raise _not_growing(model.form)
        return model if above.all() else model.with_floor(every)

    @classmethod
    def analytic(cls, flops: TransformerFlops, flops_per_second: float = 4e14, longest: int = 80_000) -> StepTimeModel:
        """The model of a transformer that nobody has measured: FLOPs over a speed.

        Ratios between shapes are what the planner needs, and they do not depend on the speed.

        Args:
            flops: The transformer's work.
            flops_per_second: Speed that it reaches.
            longest: Longest sequence that the power law is fitted to, in tokens.
        """
        additive = AdditiveCost(0.0, flops.per_token / flops_per_second, flops.per_pair / flops_per_second)
        lengths = np.geomspace(longest / 100, longest, 64)
        power_law = PowerLaw.fit(np.ones(64), lengths, additive.predict(1, lengths))
        misses = power_law.predict(1, lengths) / additive.predict(1, lengths) - 1
        one_token = float(additive.predict(1, 1))
        return cls(power_law, additive, float(np.median(np.abs(misses))), 0.0, one_token)

    def with_floor(self, points: Points) -> StepTimeModel:
        """Returns this model with the floor that measurements show; see `cost.launch_bound.floor_of`."""
        return replace(self, floor=floor_of(self.form.predict(points.samples, points.lengths), points))

    @property
    def form(self) -> PowerLaw | AdditiveCost:
        """The form that predicts held-out shapes better."""
        return self.additive if self.additive_error <= self.power_law_error else self.power_law

    def grows_from(self, length: float) -> bool:
        """Whether samples of a length take any time beside that of the step; by the sum they may take none."""
        return float(self.form.predict(1, length)) > self.form.a

    def predict(self, batch: ArrayLike, sequence_length: ArrayLike) -> NDArray[np.float64]:
        """Seconds of micro-batches of B samples of S tokens, never below the floor."""
        # A power law may cross zero for tiny shapes; a plan needs costs above zero.
        return np.maximum(self.form.predict(batch, sequence_length), self.floor)

    def budget(self, target_sync: float, m_mem: float) -> BucketBudget:
        """The budget whose micro-batches take at most a given time: M_comp = (target_sync - a) / b.

        Args:
            target_sync: Seconds that a micro-batch may take.
            m_mem: Memory budget in tokens.

        Raises:
            ValueError: If the target is not above what an empty step takes.
        """
        law = self.power_law
        if target_sync <= law.a:
            raise ValueError(f"target_sync={target_sync} s is not above the {law.a:.4g} s that any step takes.")
        return BucketBudget(m_mem, (target_sync - law.a) / law.b, law.p)

    @property
    def version(self) -> str:
        """Twelve hex digits that name these coefficients."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON and checkpoints."""
        return asdict(self, dict_factory=plain_numbers)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> StepTimeModel:
        """Reads what `to_dict` returned."""
        forms = {"power_law": PowerLaw(**fields["power_law"]), "additive": AdditiveCost(**fields["additive"])}
        return cls(**{**fields, **forms})


def _not_growing(form: PowerLaw | AdditiveCost) -> ValueError:
    return ValueError(
        f"The measured times do not grow with the work ({form}). `videoscale benchmark-shapes` takes the times that "
        "the device needs; if they are its own, raise --max-tokens. Times of your own must end after "
        "torch.cuda.synchronize()."
    )
