"""How much longer a rank takes than the others for the same work, and what that costs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_videoscale.cost import Measurement
from lightning_videoscale.cost.observations import ObservedCosts
from lightning_videoscale.timing import StepWindow


def slowdowns_of(window: StepWindow) -> list[float]:
    """Returns the compute time of every global rank over that of a healthy one, for the same work.

    It is by the definition of `BudgetRecalibrator` (`ObservedCosts`): what shapes cost is fitted beside it, and the
    lower median of the ranks is healthy. Where batches do not tell what they are, they are taken for alike.
    """
    compute, samples, lengths = (window.column(name) for name in ("compute", "samples", "sequence_length"))
    if not window.tells_loads or not bool((compute > 0).any()):
        of_rank = compute.sum(dim=1)
        return (of_rank / of_rank.sort().values[(len(of_rank) - 1) // 2].clamp_min(1e-12)).tolist()
    ranks = torch.arange(len(compute), dtype=torch.float64)[:, None].expand_as(compute)
    rows = torch.stack([samples, lengths, compute, ranks], dim=2).reshape(-1, 4).tolist()
    observed = ObservedCosts()
    observed.add([Measurement(int(b), int(s), seconds, dp_rank=int(rank)) for b, s, seconds, rank in rows])
    return [observed.speeds.get(rank, 1.0) for rank in range(len(compute))]


def even_work(window: StepWindow, slowdowns: Sequence[float]) -> Tensor:
    """Seconds that every data-parallel rank would work from wait to wait, were all as fast as a healthy one.

    Args:
        window: The steps.
        slowdowns: Of every global rank, as of `slowdowns_of`.

    Returns:
        float64 of shape ``(dp_ranks, waits)``, see `StepWindow.per_wait`. A sequence-parallel group is as slow as
        its slowest rank.
    """
    ranks = torch.tensor(window.dp_ranks)
    of_ranks = torch.tensor(slowdowns, dtype=torch.float64)
    of_groups = [of_ranks[ranks == rank].max() for rank in sorted(set(window.dp_ranks))]
    return window.per_wait(window.of_groups("work")) / torch.stack(of_groups)[:, None]
