"""What to do about a run: all advice there is, of `BottleneckAnalyzer` while it trains and of the report after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_videoscale.report.bottlenecks import WORTH_NAMING, Name, Straggler
from lightning_videoscale.report.causes import SLOW, WRONG
from lightning_videoscale.report.charts import number, percent
from lightning_videoscale.report.costs import batch_size

if TYPE_CHECKING:
    from lightning_videoscale.report.drift import Drift
    from lightning_videoscale.report.findings import Findings
    from lightning_videoscale.report.reading import LoggedRecord

_GROWN = {
    "data": ("look at the loader and the storage", "Waiting for data grew most."),
    "wait": ("look for a rank that became slow", "Waiting for other ranks grew most."),
    "exchange": ("look at the network between the ranks", "Exchanges between ranks grew most."),
    "optimizer": ("look at the optimizer's step", "The optimizer's step grew most."),
}
"""What to do about a fall of the throughput, and why, by the part of the step that grew most, if it is not the work."""

BALANCED = 0.05
"""Median CV_step up to which a run is called balanced."""

_LATELY = 10
"""Records by which the end of a run is judged."""

_IN_STOCK = 0.5
"""Share of their time that workers work below which they are not what ranks wait for."""


class Advice(NamedTuple):
    """Something to do, and why."""

    what: str
    why: str


def advice_on_bottleneck(name: Name, straggler: Straggler, on_gpu: bool) -> str:
    """Returns what to try against what costs the most."""
    is_slow = straggler.steps > 0.8 and straggler.slowdown >= SLOW
    advice: dict[Name, str] = {
        "data": (
            "Raise num_workers of the loader, or encode the videos to latents first (videoscale encode); check the "
            "speed of the storage."
        ),
        "exchange": (
            "Use a smaller sequence-parallel group or keep it within a host, accumulate more micro-batches under DDP, "
            "or under FSDP2 shard within nodes (replicas=)."
        ),
        "straggler": (
            f"It is nearly always rank {straggler.rank}: {_look_at(straggler.rank, on_gpu)}."
            if is_slow
            else "Use balance='planned' with a cost model measured on this machine (videoscale benchmark-shapes) and "
            "BudgetRecalibrator, and accumulate more micro-batches per step."
        ),
        "kernels": (
            "Balanced and fed: use FusedKernels and the strategy's compile=True, and where memory allows "
            "(MemoryMonitor says how much is left) no activation checkpointing, or of a share of the blocks, such as "
            "activation_checkpointing=0.5."
        ),
        "optimizer": (
            "Use a fused optimizer (fused=True), or shard it (ulysses_fsdp2, ulysses_deepspeed_stage_1), or accumulate "
            "more micro-batches per step."
        ),
        "between": (
            f"Look for what rank {straggler.rank} does between steps and the others do not: callbacks, logs and files "
            "of one rank, or a longer validation. Share it out, or do it less often."
        ),
    }
    return advice[name]


def _look_at(rank: int, on_gpu: bool) -> str:
    """How to find out why a rank is slow."""
    if on_gpu:
        return f"compare the clock, temperature and neighbours of rank {rank}'s GPU with the others' (nvidia-smi -q)"
    return f"see what else runs on the cores of rank {rank}, and how many threads it has (torch.get_num_threads)"


def advice_on_run(found: Findings) -> list[Advice]:
    """Returns what to do after a run, the most pressing first; may be empty."""
    judgements = (
        _of_failure, _of_loss, _of_drift, _of_slow_rank, _of_bottleneck, _of_loading, _of_balance, _of_cost_model,
        _of_memory,
    )  # fmt: skip
    return [advice for judge in judgements if (advice := judge(found)) is not None]


def _of_failure(found: Findings) -> Advice | None:
    end = found.run.last("end")
    if found.status == "unfinished":
        return Advice("Resume from the last checkpoint, if the run was killed", "The log has no end of this run.")
    if found.status == "failed" and end is not None:
        return Advice("Look into the error that ended the run", str(end.get("error", "")))
    return None


def _of_loss(found: Findings) -> Advice | None:
    lost = [window["step"] for window in found.windows if window.get("loss_is_finite") is False]
    if not lost:
        return None
    records = f"{len(lost):,} of {len(found.windows):,} records"
    return Advice(
        "Look into the loss: it is NaN or infinite",
        f"It is so in {records}, first in the one up to step {lost[0]}; the chart leaves them out.",
    )


def _of_drift(found: Findings) -> Advice | None:
    drift = found.drift
    if drift is None:
        return None
    seen = f"From {number(drift.before)} to {number(drift.after)} tokens/s, medians of the windows on either side."
    what, why = _cause_of(drift)
    return Advice(f"Throughput fell by {percent(drift.lost)} after step {drift.step}: {what}", f"{seen} {why}")


def _cause_of(drift: Drift) -> tuple[str, str]:
    """What to do, and why."""
    if drift.grown in _GROWN:
        return _GROWN[drift.grown]
    if drift.same_work is None:
        return "compare the clips before and after", "No micro-batches of the same shape were trained before and after."
    factor = f"Micro-batches of the same shape take {drift.same_work:.2f} times as long since"
    if drift.same_work < 1 + drift.lost / 2:
        return "compare the clips before and after", f"{factor}, which does not explain it: other shapes came."
    return "see what else runs on the machine, and at which clock", f"{factor}."


def _of_slow_rank(found: Findings) -> Advice | None:
    if found.data_parallel_ranks == 1 or not found.windows or found.cause != "rank" or found.unevenness <= BALANCED:
        return None
    rank, slowdown = found.slow_ranks[0]
    look = _look_at(rank, found.on_gpu)
    return Advice(
        look[0].upper() + look[1:],
        f"For the same work rank {rank} takes {slowdown:.2f} times as long as a healthy rank. Were all as fast, "
        f"waiting for the slowest would take {percent(found.even_idle)} of the time instead of {percent(found.idle)}.",
    )


def _of_bottleneck(found: Findings) -> Advice | None:
    usual = _usual_bottleneck(found)
    if usual is None or usual["name"] == "kernels":  # no loss, but the work itself
        return None
    if usual["name"] == "straggler" and (_of_slow_rank(found) is not None or _is_unexplained(found)):
        return None  # said with the figure of the whole run, or not to be helped by what is said of stragglers
    if usual["name"] == "data" and found.loading is not None:
        return None  # said with what the loaders did
    return Advice(usual["advice"], usual["figure"])


def _usual_bottleneck(found: Findings) -> LoggedRecord | None:
    """The last finding of the kind that was found most often lately: the last one of all may be of a step or two."""
    lately = found.alike("bottleneck")[: -_LATELY - 1 : -1]
    names = [record["name"] for record in lately]
    return max(lately, key=lambda record: names.count(record["name"]), default=None)


def _is_unexplained(found: Findings) -> bool:
    return bool(found.windows) and found.data_parallel_ranks > 1 and found.cause == "chance"


def _of_loading(found: Findings) -> Advice | None:
    loading, usual = found.loading, _usual_bottleneck(found)
    if loading is None or not found.windows:
        return None
    share = percent(found.share_of("data"))
    seen = f"Ranks wait for data for {share} of their steps."
    if usual is not None and usual["name"] == "data":
        seen = str(usual["figure"])
    elif found.share_of("data") < WORTH_NAMING:
        return None
    if loading.busy < _IN_STOCK:
        return Advice(
            "Look at how workers start and hand batches over: more of them would not help",
            f"{seen} But the workers of the loaders work for {percent(loading.busy)} of their time, and have enough in "
            "stock for the rest. They start with every epoch, so longer epochs wait less.",
        )
    return Advice(
        "Look at the storage, or raise num_workers of VideoDataModule"
        if loading.reading > 0.5
        else "Raise num_workers of VideoDataModule, or encode the videos to latents first (videoscale encode)",
        f"{seen} Of the time that the loaders work, {percent(loading.reading)} is reading and "
        f"{percent(1 - loading.reading)} decoding.",
    )


def _of_balance(found: Findings) -> Advice | None:
    if not found.predicted or found.plans[-1]["balance"] == "planned":
        return None
    now, then = (float(found.predicted[name].idle.mean()) for name in (found.plans[-1]["balance"], "planned"))
    if now - then < 0.02:
        return None
    return Advice(
        'VideoDataModule(balance="planned")',
        f"On the same clips ranks would wait for the slowest {percent(then)} of their time instead of "
        f"{percent(now)}, by prediction.",
    )


def _of_cost_model(found: Findings) -> Advice | None:
    cost_cv, cv_step = found.per_step("cost_cv"), found.per_step("cv_step")
    if found.planner_error is None or not len(cost_cv) or np.median(cv_step) <= BALANCED or found.cause == "rank":
        return None
    if np.median(cost_cv) > 0.5 * np.median(cv_step) or found.planner_error < WRONG:
        return None
    remedy = "Measure the shapes (videoscale benchmark-shapes), or add BudgetRecalibrator"
    if "BudgetRecalibrator" in found.start["callbacks"]:
        remedy = "Let BudgetRecalibrator go on, or measure the shapes (videoscale benchmark-shapes)"
    return Advice(
        remedy,
        f"The plan balances predicted cost to {percent(float(np.median(cost_cv)))}, and its predictions are "
        f"{percent(found.planner_error)} off the measured times (median).",
    )


def _of_memory(found: Findings) -> Advice | None:
    known = [memory for memory in found.memory if "fits_tokens" in memory][-_LATELY:]
    if not known or not found.plans:
        return None
    fits, headroom = (min(memory[name] for memory in known) for name in ("fits_tokens", "headroom_tokens"))
    budget = found.plans[-1]["budget"]
    m_mem, planned = budget["m_mem"], budget.get("overhead_tokens", 0.0)
    # Tokens that fit beside some overhead do not fit beside less.
    overhead = max(planned, *(memory.get("overhead_tokens", 0.0) for memory in known))
    beside = f" and overhead_tokens to {overhead:,.4g}" if overhead > planned else ""
    wanted = f"m_mem to {fits:,.0f}{beside} tokens"
    if fits < 1:
        return Advice(
            "Shard the states over more ranks, checkpoint activations, or let more ranks share a sequence",
            "The fullest GPU has no room for a single token beside the model's states and the reserve.",
        )
    if not _changes_batches(found, fits, overhead):
        return None  # M_comp limits the batches, or one clip alone is too large
    if headroom < 0 and (fits < m_mem or overhead > planned):
        return Advice(f"Set {wanted}", "The largest micro-batches leave no reserve free.")
    if headroom < 0 or fits < 1.1 * m_mem:
        return None
    return Advice(
        f"Raise {wanted}",
        f"Micro-batches of so many tokens fit on the fullest GPU; m_mem = {m_mem:,.0f} limits those of some shapes.",
    )


def _changes_batches(found: Findings, m_mem: float, overhead: float) -> bool:
    """Whether the last plan would have batches of other sizes under another M_mem, of the shapes that were trained."""
    plan = found.plans[-1]
    other = plan | {"budget": plan["budget"] | {"m_mem": m_mem, "overhead_tokens": overhead}}
    return any(batch_size(plan, kind.tokens) != batch_size(other, kind.tokens) for kind in found.kinds)
