"""Steps of a LightningModule outside of a Trainer's loop: `nothing_logged`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_videoscale.compat.patching import patch
from lightning_videoscale.compat.torch.modules import children_of


@contextmanager
def nothing_logged(module: pl.LightningModule) -> Iterator[None]:
    """Inside, what a module logs goes nowhere, as it may only in a loop, and its torchmetrics are copies to throw away.

    Metrics keep what they have summed up in attributes, and not in buffers.
    """
    kept = list(_metrics_of(module))
    copies: dict[int, nn.Module] = {id(metric): copy.deepcopy(metric) for _, _, metric in kept}
    log_again = patch(module, "log", lambda *_, **__: None)
    try:
        for parent, name, metric in kept:
            setattr(parent, name, copies[id(metric)])
        yield
    finally:
        log_again()
        for parent, name, metric in kept:
            setattr(parent, name, metric)


def _metrics_of(module: nn.Module) -> Iterator[tuple[Any, str, nn.Module]]:
    """Parent, name and metric, or collection of metrics."""
    for name, child in children_of(module).items():  # also one that has a second name
        if isinstance(child, Metric | MetricCollection):
            yield module, name, child
        elif child is not None:
            yield from _metrics_of(child)
