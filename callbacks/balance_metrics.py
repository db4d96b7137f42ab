"""The figures of `LoadBalanceMonitor`: from what all ranks did in some steps, and summed up for the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.cost import TransformerFlops, training_flops
from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.cost.spread import compute_cv, cv_step
from lightning_videoscale.timing import StepWindow

_RATIOS = {
    "balance/cv_step": ("cv_step", "steps"),
    "balance/compute_cv": ("compute_cv", "told_steps"),
    "balance/cost_cv": ("cost_cv", "predicted_steps"),
    "balance/physical_load": ("physical_load", "loads"),
    "balance/padding_share": ("padding", "processed"),
    "throughput/tokens_per_second": ("tokens", "seconds"),
    "throughput/samples_per_second": ("samples", "seconds"),
    "throughput/efficiency": ("latent_cells", "rank_seconds"),
    "throughput/mfu": ("model_flops", "possible_flops"),
}
"""By the name under which it is logged, each figure is one sum over another: of a window, or of the run."""

_SUMMARY = {"efficiency": "throughput_efficiency"}
_NOT_IN_SUMMARY = {"physical_load", "samples_per_second"}


class BalanceMetrics:
    """See `LoadBalanceMonitor` for what is computed. Every rank updates with all ranks' figures.

    Args:
        p: Exponent of the sequence length in the load B · S^p.
        geometry: From pixels to latents, where batches hold pixels.

    Attributes:
        flops: Of the transformer, and peak FLOP/s of a device, where the MFU is wanted.
        sums: Of the run so far, by name: ``samples``, ``tokens`` and ``latent_cells`` without fillers, ``model_flops``
            of forward and backward, wall-clock ``seconds``, ``rank_seconds`` of all ranks together, ``steps``, ...
    """

    def __init__(self, p: float, geometry: ModelGeometry) -> None:
        self.p = p
        self.geometry = geometry
        self.flops: tuple[TransformerFlops, float] | None = None
        self.sums: Counter[str] = Counter()

    def update(self, window: StepWindow, seconds: float) -> dict[str, float]:
        """Adds steps of all ranks that took ``seconds`` of wall-clock time; returns their figures by logged name."""
        sums: dict[str, float] = {
            "cv_step": float(cv_step(window.work).sum()),
            "steps": window.steps,
        }
        if window.tells_loads:
            sums |= self._balance_of_loads(window) | self._throughput(window, seconds)
        self.sums.update(sums)
        return _ratios(sums) | _seconds_per_step(window)

    def _balance_of_loads(self, window: StepWindow) -> dict[str, float]:
        physical, costs = window.loads(2.0), window.predicted_costs
        samples, length = window.of_groups("samples"), window.of_groups("sequence_length")
        sums = {
            "compute_cv": float(compute_cv(window.loads(self.p)).sum()),
            "told_steps": window.steps,
            "physical_load": float(physical.sum()),
            "loads": physical.numel(),
            "padding": float(((samples - window.counted) * length).sum()),
            "processed": float((samples * length).sum()),
        }
        if costs is not None:
            sums |= {"cost_cv": float(compute_cv(costs).sum()), "predicted_steps": window.steps}
        return sums

    def _throughput(self, window: StepWindow, seconds: float) -> dict[str, float]:
        counted, lengths = window.counted, window.of_groups("sequence_length")
        rank_seconds = seconds * len(window.dp_ranks)
        sums: dict[str, float] = {
            "samples": int(counted.sum()),
            "tokens": int((counted * lengths).sum()),
            "seconds": seconds,
            "rank_seconds": rank_seconds,
        }
        if cells := float((counted * self._latent_cells(window)).sum()):
            sums["latent_cells"] = cells
        if self.flops is not None:
            transformer, peak = self.flops
            sizes = Counter(zip(counted.long().flatten().tolist(), lengths.long().flatten().tolist(), strict=True))
            flops = sum(count * training_flops(transformer, *size) for size, count in sizes.items())
            sums |= {"model_flops": flops, "possible_flops": rank_seconds * peak}
        return sums

    def _latent_cells(self, window: StepWindow) -> Tensor:
        """Of one sample: latent frames · rows · columns."""
        sizes: list[Any] = [window.of_groups(name) for name in ("frames", "height", "width")]
        frames, height, width = sizes
        stride = self.geometry.spatial_stride
        of_pixels = self.geometry.latent_frames(frames) * (height // stride) * (width // stride)
        return torch.where(window.of_groups("has_pixels") > 0, of_pixels, frames * height * width)

    def summary(self) -> dict[str, float]:
        """Returns the figures of the run; what was never known is left out."""
        figures = {name.partition("/")[2]: value for name, value in _ratios(self.sums).items()}
        figures = {_SUMMARY.get(name, name): value for name, value in figures.items() if name not in _NOT_IN_SUMMARY}
        return figures | {name: self.sums[name] for name in ("samples", "tokens") if name in self.sums}

    def state_dict(self) -> dict[str, Any]:
        """Returns all sums."""
        return {"sums": dict(self.sums)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them up again."""
        self.sums = Counter(state_dict["sums"])


def _ratios(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: sums[one] / sums[other] for name, (one, other) in _RATIOS.items() if one in sums and sums.get(other)}


def _seconds_per_step(window: StepWindow) -> dict[str, float]:
    """Where the time of the mean rank goes. What all ranks wait is the collective; beyond it they wait for a rank."""
    seconds = {name: window.column(name).mean(dim=0) for name in ("compute", "data", "exchange", "optimizer", "wait")}
    seconds |= {"reduction": window.reduction, "straggler": seconds.pop("wait") - window.reduction}
    return {f"time/{name}": float(value.sum()) / window.steps for name, value in seconds.items()}
