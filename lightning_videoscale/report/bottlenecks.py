"""Names what costs a training the most, from the times of all ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.report.slowness import slowdowns_of
from lightning_videoscale.timing import StepWindow

Name = Literal["data", "exchange", "straggler", "kernels", "optimizer", "between"]

WORTH_NAMING = 0.1
"""Share of the step below which a loss is not the bottleneck: then it is the work itself."""


class StepShares(NamedTuple):
    """Where the mean rank's time goes, in seconds per step; together the step, without its own time between steps.

    Attributes:
        data: Waiting for the loader, or for a rank that waits for its loader.
        exchange: Exchanges between ranks that nothing hides: sequence parallelism's, and of parameters and gradients as
            long as even the rank waits that comes last.
        straggler: Waiting for ranks that work longer.
        kernels: Forward and backward passes.
        optimizer: Clipping and the optimizer's step.
        between: Waiting for ranks that are busy between steps, with callbacks, logs or files of theirs alone.
    """

    data: float
    exchange: float
    straggler: float
    kernels: float
    optimizer: float
    between: float

    @property
    def total(self) -> float:
        """Seconds per step."""
        return sum(self)

    def share(self, name: str) -> float:
        """Returns a field as a share of the step, in [0, 1]."""
        return float(getattr(self, name)) / self.total if self.total > 0 else 0.0

    @property
    def bottleneck(self) -> Name:
        """The largest loss, if one takes a tenth of the step or more, else "kernels"."""
        losses: tuple[Name, ...] = ("data", "exchange", "straggler", "optimizer", "between")
        worst = max(losses, key=self.share)
        return worst if self.share(worst) >= WORTH_NAMING else "kernels"


class Straggler(NamedTuple):
    """The rank most often the last to arrive: in which share of the steps, and its slowdown, see `slowdowns_of`."""

    rank: int
    steps: float
    slowdown: float


def shares_of(window: StepWindow) -> StepShares:
    """Divides the mean rank's time.

    What all ranks wait at a synchronisation is the exchange itself; beyond it they wait for the rank that comes last in
    the step, or in a micro-batch where they wait in each. The reason is what that rank does longer than the mean:
    loading, computing, or something between steps. What none of these explains counts as computing.
    """
    idle = window.per_wait(window.column("wait") - window.reduction).mean(dim=0)
    last = _last_ranks(window)[None]
    reasons = torch.stack([_excess(window.per_wait(window.column(p)), last) for p in ("data", "compute", "other")])
    for_data, _, between = (idle * reasons / reasons.sum(dim=0).maximum(idle).clamp_min(1e-12)).sum(dim=1)
    data, exchange, kernels, optimizer = (
        window.column(phase).mean(dim=0).sum() for phase in ("data", "exchange", "compute", "optimizer")
    )
    seconds = (
        data + for_data,
        exchange + window.reduction.sum(),
        idle.sum() - for_data - between,
        kernels,
        optimizer,
        between,
    )
    return StepShares(*(float(part) / window.steps for part in seconds))


def straggler_of(window: StepWindow) -> Straggler:
    """Finds who comes last."""
    last = _last_ranks(window)
    rank = int(last.mode().values)
    return Straggler(rank, float((last == rank).double().mean()), slowdowns_of(window)[rank])


def _last_ranks(window: StepWindow) -> Tensor:
    """Of every step, or micro-batch where ranks wait in each, the rank that waits least, (waits,)."""
    return window.per_wait(window.column("wait")).argmin(dim=0)


def _excess(seconds: Tensor, rank: Tensor) -> Tensor:
    """What one rank, of each wait, takes longer than the mean: (ranks, waits) and (1, waits) give (waits,)."""
    return torch.relu(seconds.gather(0, rank)[0] - seconds.mean(dim=0))


def figure_of(name: Name, shares: StepShares, straggler: Straggler) -> str:
    """Returns a sentence that says how much it is."""
    part = f"{shares.share(name):.0%} of the step ({getattr(shares, name):.3g} s of {shares.total:.3g} s)"
    last = f"rank {straggler.rank} is the last in {straggler.steps:.0%} of the steps."
    sentences: dict[Name, str] = {
        "data": f"Ranks wait for data for {part}.",
        "exchange": f"Exchanges between ranks that nothing hides take {part}.",
        "straggler": f"Ranks wait for slower ones for {part}; {last}",
        "kernels": f"The forward and backward passes take {part}, and no loss takes a tenth of it.",
        "optimizer": f"Clipping and the optimizer take {part}.",
        "between": f"Ranks wait for one that is busy between steps for {part}; {last}",
    }
    return sentences[name]
