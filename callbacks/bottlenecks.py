"""Names what costs a training the most, from the times of all ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.callbacks.step_window import RankTimes

Name = Literal["data", "exchange", "straggler", "kernels", "optimizer"]

WORTH_NAMING = 0.1
"""Share of the step below which a loss is not the bottleneck: then it is the work itself."""


class StepShares(NamedTuple):
    """Where the mean rank's time goes, in seconds per step; together the step, without what lies between steps.

    Attributes:
        data: Waiting for the loader, or for a rank that waits for its loader.
        exchange: Exchanges between ranks that nothing hides: sequence parallelism's, and of parameters and gradients as
            long as even the rank waits that comes last.
        straggler: Waiting for ranks that work longer.
        kernels: Forward and backward passes.
        optimizer: Clipping and the optimizer's step.
    """

    data: float
    exchange: float
    straggler: float
    kernels: float
    optimizer: float

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
        losses: tuple[Name, ...] = ("data", "exchange", "straggler", "optimizer")
        worst = max(losses, key=self.share)
        return worst if self.share(worst) >= WORTH_NAMING else "kernels"


class Straggler(NamedTuple):
    """The rank that is most often the last to arrive.

    Attributes:
        rank: Its number.
        steps: Share of the steps in which it is, in [0, 1].
        slowdown: Its compute time over the mean of all ranks.
    """

    rank: int
    steps: float
    slowdown: float


def shares_of(window: RankTimes) -> StepShares:
    """Divides the mean rank's time.

    What all ranks wait at a synchronisation is the exchange itself; beyond it they wait for the rank that comes last in
    the step. The reason is what that rank does longer than the mean: loading, or computing.
    """
    wait = window.part("wait")
    reduction = wait.amin(dim=0).sum()
    idle = window.per_step(wait - wait.amin(dim=0)).mean(dim=0)
    last = _last_ranks(window)[None]
    by_data, by_work = (_excess(window.per_step(window.part(phase)), last) for phase in ("data", "compute"))
    idle_for_data = (idle * by_data / (by_data + by_work).clamp_min(1e-12)).sum()
    steps = len(window.micro_batches)
    seconds = {phase: window.part(phase).mean(dim=0).sum() for phase in ("data", "compute", "exchange", "optimizer")}
    return StepShares(
        data=float(seconds["data"] + idle_for_data) / steps,
        exchange=float(seconds["exchange"] + reduction) / steps,
        straggler=float(idle.sum() - idle_for_data) / steps,
        kernels=float(seconds["compute"]) / steps,
        optimizer=float(seconds["optimizer"]) / steps,
    )


def straggler_of(window: RankTimes) -> Straggler:
    """Finds who comes last."""
    last = _last_ranks(window)
    rank = int(last.mode().values)
    compute = window.part("compute").sum(dim=1)
    return Straggler(rank, float((last == rank).double().mean()), float(compute[rank] / compute.mean()))


def _last_ranks(window: RankTimes) -> Tensor:
    """Of every step the rank that waits least, (steps,)."""
    return window.per_step(window.part("wait")).argmin(dim=0)


def _excess(seconds: Tensor, rank: Tensor) -> Tensor:
    """What one rank of every step takes longer than the mean: (ranks, steps) and (1, steps) give (steps,)."""
    return torch.relu(seconds.gather(0, rank)[0] - seconds.mean(dim=0))


def figure_of(name: Name, shares: StepShares, straggler: Straggler) -> str:
    """Returns a sentence that says how much it is."""
    part = f"{shares.share(name):.0%} of the step ({getattr(shares, name):.3g} s of {shares.total:.3g} s)"
    sentences: dict[Name, str] = {
        "data": f"Ranks wait for data for {part}.",
        "exchange": f"Exchanges between ranks that nothing hides take {part}.",
        "straggler": (
            f"Ranks wait for slower ones for {part}; rank {straggler.rank} is the last in {straggler.steps:.0%} of the "
            f"steps and computes {straggler.slowdown:.2f} times as long as the mean."
        ),
        "kernels": f"The forward and backward passes take {part}, and no loss takes a tenth of it.",
        "optimizer": f"Clipping and the optimizer take {part}.",
    }
    return sentences[name]


def advice_on(name: Name, straggler: Straggler) -> str:
    """Returns what to try."""
    always_the_same = straggler.steps > 0.8
    advice: dict[Name, str] = {
        "data": (
            "Raise num_workers of VideoDataModule, or encode the videos to latents first (videoscale encode); check "
            "the speed of the storage."
        ),
        "exchange": (
            "Use a smaller sequence-parallel group or keep it within a host, accumulate more micro-batches under DDP, "
            "or under FSDP2 shard within nodes (replicas=)."
        ),
        "straggler": (
            f"It is nearly always rank {straggler.rank}: compare its GPU's clock, temperature and neighbours with the "
            "others' (nvidia-smi -q)."
            if always_the_same
            else "Use balance='planned' with a cost model measured on this machine (videoscale benchmark-shapes) and "
            "BudgetRecalibrator, and more micro_batches per step."
        ),
        "kernels": (
            "Balanced and fed: use FusedKernels and the strategy's compile=True, and no activation checkpointing where "
            "memory allows (MemoryMonitor says how much is left)."
        ),
        "optimizer": (
            "Use a fused optimizer (fused=True), or shard it (ulysses_fsdp2, ulysses_deepspeed_stage_1), or accumulate "
            "more micro-batches per step."
        ),
    }
    return advice[name]
