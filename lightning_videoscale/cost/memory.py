"""How much memory a micro-batch takes, and so how many tokens fit: M_mem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import nonnegative_least_squares

_PLATEAU = 1.01
"""Over the least peak, what still counts as equal to it."""


class MemoryLine(NamedTuple):
    """Bytes over tokens: fixed + per_token * B * S.

    Attributes:
        fixed: Bytes without any token.
        per_token: Bytes of activations per token.
    """

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        """Bytes at so many tokens."""
        return self.fixed + self.per_token * tokens

    def tokens_in(self, nbytes: float) -> int:
        """Tokens for which so many bytes are enough; may be negative."""
        return int((nbytes - self.fixed) // self.per_token)


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes = fixed + per_token * B * S, or those at the start of backward if they are more.

    Attributes:
        fixed: Bytes without any token: weights, gradients, optimizer states, buffers.
        per_token: Bytes of activations per token.
        worst_excess: Largest relative excess of a measured peak over the prediction, at or above 0.
        at_start: Where a step has one micro-batch: before gradients of its own are there. With checkpointed
            activations that is the peak of long samples, whose activations are freed as gradients come. None: it was
            not measured, or gradients of earlier micro-batches are there all the time.
    """

    fixed: float
    per_token: float
    worst_excess: float
    at_start: MemoryLine | None = None

    @classmethod
    def fit(cls, samples: Sequence[Measurement], accumulates: bool = True) -> MemoryModel:
        """Fits measured peaks, on relative error: those above a plateau of the smallest, where they make a line.

        Args:
            samples: Measured shapes; those without a peak are left out.
            accumulates: Whether a step has several micro-batches. If it has one, and peaks of it were measured, those
                are fitted.

        Raises:
            ValueError: If fewer than 3 have a peak, or all have equally many tokens.
        """
        later = [(_tokens(m), m.peak_bytes) for m in samples if m.peak_bytes is not None]
        first = [(_tokens(m), m.first_peak_bytes) for m in samples if m.first_peak_bytes is not None]
        if accumulates or len(first) < len(later):
            return cls._over(later, None)
        at_start = [(_tokens(m), m.start_bytes) for m in samples if m.start_bytes is not None]
        return cls._over(first, _line(_above_plateau(at_start)) if len(at_start) == len(first) else None)

    @classmethod
    def _over(cls, peaks: Sequence[tuple[int, float]], at_start: MemoryLine | None) -> MemoryModel:
        peaks = _above_plateau(peaks)
        # What has another line beside it need not tell how many tokens there is room for.
        line = _line(peaks, 1.0 if at_start is None else 0.0)
        model = cls(*line, worst_excess=0.0, at_start=at_start)
        excess = max(peak / model.predict(1, tokens) - 1 for tokens, peak in peaks)
        return cls(*line, worst_excess=max(0.0, excess), at_start=at_start)

    @property
    def _lines(self) -> list[MemoryLine]:
        line = MemoryLine(self.fixed, self.per_token)
        return [line] if self.at_start is None else [line, self.at_start]

    def predict(self, samples: int, sequence_length: int) -> float:
        """Peak bytes of B samples of S tokens."""
        return max(line.at(samples * sequence_length) for line in self._lines)

    def m_mem(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """Tokens that a micro-batch may have: M_mem.

        Args:
            capacity_bytes: Memory of the device.
            reserve: Share of it that is kept free, on top of the fit's own worst excess.

        Raises:
            ValueError: If not even one token fits.
        """
        tokens = self.fits(capacity_bytes, reserve)
        if tokens < 1:
            raise ValueError(
                f"Of {capacity_bytes / 2**30:.1f} GiB, {self.fixed / 2**30:.1f} are taken before the first token: "
                "shard the states over more ranks, checkpoint activations, or use a larger sequence-parallel group."
            )
        return tokens

    def fits(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """As `m_mem`, and 0 where not even one token fits."""
        usable = capacity_bytes * (1 - reserve) / (1 + self.worst_excess)
        return max(0, min(line.tokens_in(usable) for line in self._lines))


def _tokens(measured: Measurement) -> int:
    return measured.samples * measured.sequence_length


def _above_plateau(peaks: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Leaves out peaks that other things than tokens make, as gathered weights do in small micro-batches.

    These take as much as the least. They would make the line too flat, and M_mem too large.
    """
    least = min((peak for _, peak in peaks), default=0.0)
    above = [(tokens, peak) for tokens, peak in peaks if peak > _PLATEAU * least]
    return above if _suffice(above) else peaks


def _suffice(peaks: Sequence[tuple[int, float]]) -> bool:
    return len(peaks) >= 3 and len({tokens for tokens, _ in peaks}) >= 2


def _line(peaks: Sequence[tuple[int, float]], least: float = 1.0) -> MemoryLine:
    """The line through peaks, which must grow by more than so many times what the line is off by."""
    if not _suffice(peaks):
        raise ValueError(f"A memory model needs 3 measured peaks of 2 token counts; got {len(peaks)}.")
    tokens, measured = (np.array(column, np.float64) for column in zip(*peaks, strict=True))
    terms = np.stack([np.ones_like(tokens), tokens], axis=1)
    fixed, per_token = map(float, nonnegative_least_squares(terms / measured[:, None], np.ones_like(measured)))
    line = MemoryLine(fixed, per_token)
    # A slope that is all rounding, or of a few peaks above a constant, would leave room for any number of tokens.
    if per_token * np.ptp(tokens) <= least * np.abs(terms @ line - measured).max():
        raise ValueError(f"The measured peaks do not grow with the tokens ({list(peaks)}); measure larger shapes.")
    return line
