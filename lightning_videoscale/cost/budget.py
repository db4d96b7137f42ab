"""How many samples of one sequence length make a micro-batch.

`BucketBudget` is equation 2 of AdaptiveLoad, to the letter. `time_budget.TimeBudget` bounds predicted seconds instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-13
"""Relative, of floats: room for exactly so many samples may come out this much smaller."""


def plain_numbers(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """What `asdict` makes of numbers: Python's own, since torch loads no checkpoint by default that holds numpy's."""
    return {name: _plain(value) for name, value in items}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class Budget(ABC):
    """What a micro-batch may take of memory, and of time.

    Args:
        m_mem: Memory budget M_mem in tokens: ``B * S`` stays at or below it.
        overhead_tokens: Memory that every sample takes beside its tokens, such as that of its text, in tokens: with it,
            ``B * (S + overhead_tokens)`` stays at or below M_mem. By keyword.
    """

    m_mem: float
    overhead_tokens: float = field(default=0.0, kw_only=True)

    @property
    @abstractmethod
    def p(self) -> float:
        """How the time of a step grows with the sequence length, as a power."""

    @abstractmethod
    def room(self, sequence_length: int | float) -> float:
        """How many samples of this many tokens the time allows, in fractions; below 1 where one is too much."""

    @abstractmethod
    def cost(self, samples: int, sequence_length: int) -> float:
        """What a micro-batch is predicted to take, in the unit of the budget."""

    @property
    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """What the budget consists of, by name, for logs."""

    def batch_size(self, sequence_length: int) -> int:
        """Returns how many samples make a micro-batch: as many as memory and time allow, and at least one.

        Args:
            sequence_length: Tokens S of one sample, at least 1.
        """
        room = self.room(sequence_length) * (1 + _ROUNDING)
        return max(1, math.floor(min(self.m_mem / self.memory_tokens(1, sequence_length), room)))

    def memory_tokens(self, samples: int, sequence_length: int | float) -> float:
        """What a micro-batch takes of M_mem: B * (S + overhead_tokens)."""
        return samples * (sequence_length + self.overhead_tokens)

    def batch_sizes(self, sequence_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `batch_size` of every length, shape (lengths,)."""
        # Python's numbers: numpy's powers differ in the last bit between processors, and all ranks must agree.
        return np.array([self.batch_size(length) for length in sequence_lengths.tolist()], np.int64)

    def exceeds_memory(self, sequence_length: int) -> bool:
        """Whether one sample of this many tokens is already more than the memory budget."""
        return self.memory_tokens(1, sequence_length) > self.m_mem

    def memory_alone(self) -> BucketBudget:
        """The budget of batches of equally many tokens, whatever time they take."""
        return BucketBudget(self.m_mem, math.inf, self.p, overhead_tokens=self.overhead_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON and checkpoints; `calibration.read_budget` reads them."""
        fields = asdict(self, dict_factory=plain_numbers)
        if not self.overhead_tokens:
            del fields["overhead_tokens"]  # as in checkpoints of releases that had none
        return fields

    def _check_memory(self) -> None:
        """As `_check`, of both numbers of memory; the overhead may be zero."""
        self._check("m_mem")
        overhead = _plain(self.overhead_tokens)
        if not isinstance(overhead, int | float) or not 0 <= overhead < math.inf:
            raise ValueError(
                f"{type(self).__name__}(overhead_tokens={overhead!r}): overhead_tokens must be a number of tokens, at "
                "least 0."
            )
        object.__setattr__(self, "overhead_tokens", overhead)

    def _check(self, name: str, may_be_infinite: bool = False) -> None:
        """Makes a number one of Python's own, which JSON can hold; raises ValueError if it is not above zero."""
        value = _plain(getattr(self, name))
        if not isinstance(value, int | float) or not value > 0 or (math.isinf(value) and not may_be_infinite):
            raise ValueError(f"{type(self).__name__}({name}={value!r}): {name} must be a positive number.")
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class BucketBudget(Budget):
    """The dual constraint of AdaptiveLoad: no micro-batch exceeds the memory or the compute of its budget.

    Args:
        m_mem: Memory budget M_mem in tokens: ``B * S`` stays at or below it.
        m_comp: Compute budget M_comp in tokens to the power ``p``: ``B * S**p`` stays at or below it. ``inf`` lets
            memory alone decide.
        p: How the time of a step grows with the sequence length S: 1 for the linear layers, 2 for full attention,
            a measured value in between.
        overhead_tokens: Memory that every sample takes beside its tokens, such as that of its text, in tokens: with it,
            ``B * (S + overhead_tokens)`` stays at or below M_mem. By keyword.

    Raises:
        ValueError: If a budget is not positive, ``p`` is not a positive number, or the overhead is below 0.
    """

    m_comp: float
    p: float = 2.0

    def __post_init__(self) -> None:
        self._check_memory()
        self._check("m_comp", may_be_infinite=True)
        self._check("p")

    def room(self, sequence_length: int | float) -> float:
        """Returns M_comp / S^p. With it, `batch_size` is max(1, min(⌊M_mem / S⌋, ⌊M_comp / S^p⌋)), equation 2."""
        return self.m_comp / math.pow(sequence_length, self.p)

    def cost(self, samples: int, sequence_length: int) -> float:
        """Predicted cost B * S^p of a micro-batch, in tokens to the power p."""
        return samples * math.pow(sequence_length, self.p)

    @property
    def numbers(self) -> dict[str, float]:
        """M_mem, M_comp and p."""
        return {"m_mem": self.m_mem, "m_comp": self.m_comp, "p": self.p}

    def __str__(self) -> str:
        return f"M_comp = {self.m_comp:.4g} tokens^{self.p:g}"
