"""The records of a run's log: what the run is (settings, versions, machine, exchange), its plans, and its steps.

Nothing here may tell secrets: no environment, no addresses of shards (they may be signed), no hyperparameters of the
user's module.
"""

from __future__ import annotations

import platform
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.compat.deepspeed import full_numel
from lightning_videoscale.compat.names import installed_version
from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.report.slowness import even_work, slowdowns_of
from lightning_videoscale.timing import StepTimes, StepWindow
from lightning_videoscale.topology import topology_of

_PACKAGES = ("lightning-videoscale", "torch", "lightning", "torchmetrics", "triton", "diffusers", "deepspeed")
_MOST_REFUSED = 20
_SHAPE = ("frames", "height", "width", "sequence_length", "samples")


def start_record(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Returns the fields of a `start` record."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return {
        "module": _own_class(module),
        "parameters": sum(map(full_numel, module.parameters())),
        "callbacks": [name for callback in callbacks if not (name := type(callback).__name__).startswith("_")],
        "settings": _settings(trainer),
        "exchange": _exchange(trainer),
        "machine": _machine(trainer),
        "versions": _versions(),
    }


def plan_record(planner: BucketPlanner) -> dict[str, Any]:
    """Returns the fields of a `plan` record, but for its epoch."""
    return {
        "balance": planner.balance,
        "dp_size": planner.dp_size,
        "micro_batches": planner.micro_batches,
        "loss_weighting": planner.loss_weighting,
        "loss_normalization": planner.loss_normalization,
        "seed": planner.seed,
        "budget": planner.budget.to_dict(),
        "step_time": None if planner.step_time is None else planner.step_time.to_dict(),
    }


def samples_record(data: VideoDataModule) -> dict[str, Any]:
    """Returns the fields of a `samples` record."""
    index, planner = data.index, data.planner
    refused = [[shard, member, reason] for shard, (member, reason) in index.refused]
    return {
        "indexed": len(index),
        "refused": len(refused),
        "first_refused": refused[:_MOST_REFUSED],
        "too_small": 0 if planner is None else planner.unusable,
        "without_caption": sum(index.without_caption),
    }


def window_record(window: StepWindow) -> dict[str, Any]:
    """Returns the fields of a `window` record; `log` says what they mean."""
    told, counted, costs = window.tells_loads, window.counted, window.predicted_costs
    work, slowdowns = window.per_wait(window.of_groups("work")), slowdowns_of(window)
    slowest = work.amax(dim=0)
    even = even_work(window, slowdowns)
    return {
        "steps": window.steps,
        "seconds": float((sum(map(window.column, StepTimes._fields)) - window.column("other")).sum(dim=1).max()),
        "tokens": int((counted * window.of_groups("sequence_length")).sum()) if told else None,
        "samples": int(counted.sum()) if told else None,
        "cv_step": cv_step(window.work).tolist(),
        "compute_cv": compute_cv(window.loads(2.0)).tolist() if told else None,
        "cost_cv": None if costs is None else compute_cv(costs).tolist(),
        "slowest_seconds": float(slowest.sum()),
        "idle_seconds": float((slowest - work.mean(dim=0)).sum()),
        "in_slots": window.in_slots,
        "slowdowns": slowdowns,
        "even_idle_seconds": float((even.amax(dim=0) - even.mean(dim=0)).sum()),
        "ranks": {name: window.column(name).sum(dim=1).tolist() for name in StepTimes._fields},
        "batches": _batches(window) if told else [],
    }


def mean_loss(window: StepWindow) -> float | None:
    """The mean loss of a window to which every rank added the sum of its weighted losses and of their weights first."""
    total, weight = window.values[:, :2].sum(dim=0).tolist()
    return total / weight if weight > 0 else None


def _batches(window: StepWindow) -> list[list[float]]:
    """Micro-batches of one shape and size together: [frames, height, width, S, B, count, fillers, median seconds]."""
    shapes = torch.stack([window.of_groups(name).flatten() for name in _SHAPE], dim=1)
    kinds, kind = shapes.unique(dim=0, return_inverse=True)
    fillers, seconds = window.of_groups("loss_weight").flatten() == 0, window.of_groups("work").flatten()
    table = []
    for number, shape in enumerate(kinds.long().tolist()):
        chosen = kind == number
        median = float(torch.quantile(seconds[chosen], 0.5))
        table.append([*shape, int(chosen.sum()), int(fillers[chosen].sum()), median])
    return table


def _own_class(module: pl.LightningModule) -> str:
    """The name of the user's class; `fully_shard` puts one of its own before it."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _settings(trainer: pl.Trainer) -> dict[str, Any]:
    datamodule = getattr(trainer, "datamodule", None)
    return {
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "gradient_clip_val": trainer.gradient_clip_val,
        "data": type(datamodule).__name__ if datamodule is not None else None,
    }


def _exchange(trainer: pl.Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    topology = topology_of(trainer)
    # Our strategies say more; under others every rank has its own batches and nothing is exchanged inside the model.
    said = (
        strategy.describe() if hasattr(strategy, "describe") else {"data-parallel ranks": topology.data_parallel_size}
    )
    return {"strategy": type(strategy).__name__, **said}


def schedules_of(trainer: pl.Trainer) -> dict[str, str]:
    """Returns which schedule runs each kind of attention layer, and what it was chosen by; empty if none is chosen."""
    strategy: Any = trainer.strategy
    return dict(strategy.describe_schedules()) if hasattr(strategy, "describe_schedules") else {}


def _machine(trainer: pl.Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    machine: dict[str, Any] = {"ranks": trainer.world_size, "nodes": trainer.num_nodes}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {**machine, "device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return {**machine, "device": f"{device.type} ({platform.machine()})"}


def _versions() -> dict[str, str]:
    installed = {package: installed_version(package) for package in _PACKAGES}
    versions = {"python": platform.python_version()}
    versions |= {package: version for package, version in installed.items() if version is not None}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
    return versions
