"""What a run is: settings, versions, machine, exchange and plan, as the run log keeps them.

Nothing here may tell secrets: no environment, no addresses of shards (they may be signed), no hyperparameters of the
user's module.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.data.planning import BucketPlanner
from lightning_videoscale.topology import topology_of

_PACKAGES = ("lightning-videoscale", "torch", "lightning", "torchmetrics", "triton", "diffusers", "deepspeed")


def start_record(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Returns the fields of a `start` record."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return {
        "module": _own_class(module),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
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
        "budget": asdict(planner.budget),
        "step_time": None if planner.step_time is None else planner.step_time.to_dict(),
    }


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


def _machine(trainer: pl.Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    machine: dict[str, Any] = {"ranks": trainer.world_size, "nodes": trainer.num_nodes}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {**machine, "device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return {**machine, "device": f"{device.type} ({platform.machine()})"}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
    return versions
