"""How much memory a micro-batch takes, and so how many tokens fit: M_mem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_videoscale.cost.measurement import Measurement
from lightning_videoscale.cost.points import nonnegative_least_squares

_PLATEAU = 1.01
"""Over the least peak, what still counts as equal to it."""

_TOLD_APART = 100
"""Condition number of the terms of a line, up to which samples and tokens are told apart."""


class _Peak(NamedTuple):
    samples: int
    tokens: int
    nbytes: float


class MemoryLine(NamedTuple):
    """Bytes of B samples of S tokens: fixed + per_token * B * S + per_sample * B.

    Attributes:
        fixed: Bytes without any sample.
        per_token: Bytes of activations per token.
        per_sample: Bytes that every sample takes beside its tokens, such as those of its text.
    """

    fixed: float
    per_token: float
    per_sample: float = 0.0

    def at(self, samples: int, tokens: float) -> float:
        """Bytes of so many samples that have so many tokens together."""
        return self.fixed + self.per_token * tokens + self.per_sample * samples

    @property
    def overhead_tokens(self) -> float:
        """What a sample takes beside its tokens, in tokens."""
        return self.per_sample / self.per_token

    def tokens_in(self, nbytes: float) -> int:
        """Tokens for which so many bytes are enough, those of overheads among them; may be negative."""
        return int((nbytes - self.fixed) // self.per_token)


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes = fixed + per_token * B * S + per_sample * B, or those at the start of backward if they are more.

    Attributes:
        fixed: Bytes without any sample: weights, gradients, optimizer states, buffers.
        per_token: Bytes of activations per token.
        worst_excess: Largest relative excess of a measured peak over the prediction, at or above 0.
        at_start: Where a step has one micro-batch: before gradients of its own are there. With checkpointed
            activations that is the peak of long samples, whose activations are freed as gradients come. None: it was
            not measured, or gradients of earlier micro-batches are there all the time.
        per_sample: Bytes that every sample takes beside its tokens, such as those of its text; 0 where the measured
            batch sizes do not tell.
    """

    fixed: float
    per_token: float
    worst_excess: float
    at_start: MemoryLine | None = None
    per_sample: float = 0.0

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
        later = _peaks(samples, [m.peak_bytes for m in samples])
        first = _peaks(samples, [m.first_peak_bytes for m in samples])
        if accumulates or len(first) < len(later):
            return cls._over(later, None)
        at_start = _peaks(samples, [m.start_bytes for m in samples])
        return cls._over(first, _line(_above_plateau(at_start)) if len(at_start) == len(first) else None)

    @classmethod
    def _over(cls, peaks: Sequence[_Peak], at_start: MemoryLine | None) -> MemoryModel:
        peaks = _above_plateau(peaks)
        # What has another line beside it need not tell how many tokens there is room for.
        line = _line(peaks, 1.0 if at_start is None else 0.0)
        model = cls(line.fixed, line.per_token, 0.0, at_start, line.per_sample)
        excess = max(peak.nbytes / model._at(peak.samples, peak.tokens) - 1 for peak in peaks)
        return replace(model, worst_excess=max(0.0, excess))

    @property
    def _lines(self) -> list[MemoryLine]:
        line = MemoryLine(self.fixed, self.per_token, self.per_sample)
        return [line] if self.at_start is None else [line, self.at_start]

    def _at(self, samples: int, tokens: int) -> float:
        return max(line.at(samples, tokens) for line in self._lines)

    def predict(self, samples: int, sequence_length: int) -> float:
        """Peak bytes of B samples of S tokens."""
        return self._at(samples, samples * sequence_length)

    def longest(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """Tokens S of the longest sample that fits alone; 0 where none does. Arguments are those of `m_mem`."""
        usable = self._usable(capacity_bytes, reserve)
        return max(0, min(int(line.tokens_in(usable) - line.overhead_tokens) for line in self._lines))

    def overhead_tokens(self, capacity_bytes: float, reserve: float = 0.05) -> float:
        """What a sample takes of `m_mem` beside its tokens: ``overhead_tokens`` of a budget. Arguments are the same."""
        usable = self._usable(capacity_bytes, reserve)
        room = [max(1, line.tokens_in(usable)) for line in self._lines]
        # A line that hardly grows with the tokens has overheads of many, and room for as many more than M_mem.
        return max(line.overhead_tokens * min(room) / tokens for line, tokens in zip(self._lines, room, strict=True))

    def m_mem(self, capacity_bytes: float, reserve: float = 0.05) -> int:
        """Tokens that a micro-batch may have, with `overhead_tokens` for each of its samples: M_mem.

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
        usable = self._usable(capacity_bytes, reserve)
        return max(0, min(line.tokens_in(usable) for line in self._lines))

    def _usable(self, capacity_bytes: float, reserve: float) -> float:
        return capacity_bytes * (1 - reserve) / (1 + self.worst_excess)


def _peaks(samples: Sequence[Measurement], peaks: Sequence[float | None]) -> list[_Peak]:
    return [
        _Peak(m.samples, m.samples * m.sequence_length, nbytes)
        for m, nbytes in zip(samples, peaks, strict=True)
        if nbytes is not None
    ]


def _above_plateau(peaks: Sequence[_Peak]) -> Sequence[_Peak]:
    """Leaves out peaks that other things than tokens make, as gathered weights do in small micro-batches.

    These take as much as the least. They would make the line too flat, and M_mem too large.
    """
    least = min((peak.nbytes for peak in peaks), default=0.0)
    above = [peak for peak in peaks if peak.nbytes > _PLATEAU * least]
    return above if _suffice(above) else peaks


def _suffice(peaks: Sequence[_Peak]) -> bool:
    return len(peaks) >= 3 and len({peak.tokens for peak in peaks}) >= 2


def _line(peaks: Sequence[_Peak], least: float = 1.0) -> MemoryLine:
    """The line through peaks, which must grow by more than so many times what the line is off by."""
    if not _suffice(peaks):
        raise ValueError(f"A memory model needs 3 measured peaks of 2 token counts; got {len(peaks)}.")
    samples, tokens, measured = (np.array(column, np.float64) for column in zip(*peaks, strict=True))
    terms = np.stack([np.ones_like(tokens), tokens, samples], axis=1)
    # Peaks of fewer than four, or of nearly one batch size or length, would tell samples from tokens by their noise.
    if len(peaks) < 4 or np.linalg.cond(terms / terms.max(axis=0)) > _TOLD_APART:
        terms = terms[:, :2]
    found = nonnegative_least_squares(terms / measured[:, None], np.ones_like(measured))
    line = MemoryLine(*map(float, found))
    # A slope that is all rounding, or of a few peaks above a constant, would leave room for any number of tokens.
    if line.per_token * np.ptp(tokens) <= least * np.abs(terms @ found - measured).max():
        sizes = [(peak.tokens, peak.nbytes) for peak in peaks]
        raise ValueError(f"The measured peaks do not grow with the tokens ({sizes}); measure larger shapes.")
    return line
