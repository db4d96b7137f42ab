"""The figures of `LoadBalanceMonitor`: from what all ranks did in some steps, and summed up for the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_videoscale.callbacks.step_window import RankTimes
from lightning_videoscale.cost import TransformerFlops, training_flops
from lightning_videoscale.data.batch_load import load_of
from lightning_videoscale.data.geometry import ModelGeometry
from lightning_videoscale.metrics import ComputeCV, PaddingShare, PhysicalLoad, StepTimeSpread


class MicroBatchLoad(NamedTuple):
    """What a micro-batch asks of a rank; zeros where the batch does not tell.

    Attributes:
        samples: B.
        tokens: S of one sample.
        counts: 1, or 0 where its samples only fill a gap.
        predicted_cost: Of the planner.
        latent_cells: Of one sample: latent frames · rows · columns.
    """

    samples: float = 0.0
    tokens: float = 0.0
    counts: float = 0.0
    predicted_cost: float = 0.0
    latent_cells: float = 0.0

    @classmethod
    def of(cls, batch: Any, geometry: ModelGeometry) -> MicroBatchLoad | None:
        """Reads a batch; None where it has no complete ``meta``.

        Args:
            batch: What the training step receives.
            geometry: From pixels to latents, where the batch holds pixels.
        """
        load = load_of(batch)
        if load is None:
            return None
        frames, height, width = (int(getattr(load, name, 0)) for name in ("frames", "height", "width"))
        if "video" in batch:
            frames = geometry.latent_frames(frames)
            height, width = height // geometry.spatial_stride, width // geometry.spatial_stride
        return cls(
            samples=load.samples,
            tokens=load.sequence_length,
            counts=float(load.loss_weight != 0.0),
            predicted_cost=float(getattr(load, "predicted_cost", 0.0)),
            latent_cells=frames * height * width,
        )


class BalanceMetrics:
    """See `LoadBalanceMonitor` for what is computed.

    Every rank updates with all ranks' figures, so nothing needs to be synced.

    Args:
        p: Exponent of the sequence length in the load B · S^p.

    Attributes:
        flops: Of the transformer, and peak FLOP/s of a device, where the MFU is wanted.
        samples: Seen so far by all ranks.
        tokens: Likewise.
        latent_cells: Likewise, of all samples.
        model_flops: Likewise, of forward and backward.
        seconds: Wall time of the steps so far.
        rank_seconds: The same times the number of ranks.
    """

    def __init__(self, p: float) -> None:
        self.step_time_spread = StepTimeSpread(sync_on_compute=False)
        self.compute_cv = ComputeCV(p, sync_on_compute=False)
        self.cost_cv = ComputeCV(p=1.0, sync_on_compute=False)
        self.physical_load = PhysicalLoad(sync_on_compute=False)
        self.padding_share = PaddingShare(sync_on_compute=False)
        self.flops: tuple[TransformerFlops, float] | None = None
        self.samples = self.tokens = self.latent_cells = 0
        self.model_flops = self.seconds = self.rank_seconds = 0.0

    def update(self, window: RankTimes, seconds: float) -> dict[str, float]:
        """Adds some steps of all ranks and returns their figures by the names under which they are logged.

        Args:
            window: The steps, with the fields of `MicroBatchLoad` for loads.
            seconds: Their wall time.
        """
        compute = window.per_step(window.of_slowest_peers(window.part("compute")))
        figures = {"balance/cv_step": float(self.step_time_spread(compute))} | _seconds_per_step(window)
        loads = dict(zip(MicroBatchLoad._fields, window.of_first_peers(window.loads).unbind(dim=2), strict=True))
        if bool((loads["samples"] > 0).all()):
            figures |= self._balance_of_loads(window, loads)
            figures |= self._throughput(window, loads, seconds)
        return figures

    def _balance_of_loads(self, window: RankTimes, loads: Mapping[str, Tensor]) -> dict[str, float]:
        # All steps in one call: in this time the device has nothing to do.
        split = {name: window.by_step(loads[name]) for name in ("samples", "tokens", "predicted_cost")}
        steps = split["samples"], split["tokens"]
        tokens = loads["samples"] * loads["tokens"]
        figures = {
            "balance/compute_cv": float(self.compute_cv(*steps)),
            "balance/physical_load": float(self.physical_load(*steps)["mean"]),
            "balance/padding_share": float(self.padding_share(tokens * loads["counts"], tokens)),
        }
        if bool((loads["predicted_cost"] > 0).all()):
            cost = split["predicted_cost"]
            figures["balance/cost_cv"] = float(self.cost_cv(torch.ones_like(cost), cost))
        return figures

    def _throughput(self, window: RankTimes, loads: Mapping[str, Tensor], seconds: float) -> dict[str, float]:
        ranks = len(window.dp_ranks)
        counted = loads["samples"] * loads["counts"]
        samples, tokens = int(counted.sum()), int((counted * loads["tokens"]).sum())
        cells = int((counted * loads["latent_cells"]).sum())
        self.samples += samples
        self.tokens += tokens
        self.latent_cells += cells
        self.seconds += seconds
        self.rank_seconds += seconds * ranks
        figures = {
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/samples_per_second": samples / seconds,
        }
        if cells:
            figures["throughput/efficiency"] = cells / (seconds * ranks)
        if self.flops is not None:
            transformer, peak = self.flops
            # Fillers are left out: they are no progress.
            shapes, counts = (
                torch.stack([counted, loads["tokens"]], dim=2).flatten(0, 1).unique(dim=0, return_counts=True)
            )
            flops = sum(
                count * training_flops(transformer, int(batch), int(length))
                for (batch, length), count in zip(shapes.tolist(), counts.tolist(), strict=True)
            )
            self.model_flops += flops
            figures["throughput/mfu"] = flops / (seconds * ranks * peak)
        return figures

    def summary(self) -> dict[str, float]:
        """Returns the figures of the run; what was never known is left out."""
        averages: dict[str, StepTimeSpread | ComputeCV] = {
            "cv_step": self.step_time_spread,
            "compute_cv": self.compute_cv,
            "cost_cv": self.cost_cv,
        }
        figures = {name: metric.compute().item() for name, metric in averages.items() if metric.steps > 0}
        if self.seconds > 0:
            figures["padding_share"] = self.padding_share.compute().item()
            figures["tokens_per_second"] = self.tokens / self.seconds
            figures["samples"] = self.samples
            figures["tokens"] = self.tokens
            if self.latent_cells:
                figures["throughput_efficiency"] = self.latent_cells / self.rank_seconds
            if self.flops is not None:
                figures["mfu"] = self.model_flops / (self.rank_seconds * self.flops[1])
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Returns all sums."""
        sums: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        return sums | {name: dict(metric.metric_state) for name, metric in self._metrics().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them up again."""
        for name in _COUNTERS:
            setattr(self, name, state_dict[name])
        for name, metric in self._metrics().items():
            for state, value in state_dict[name].items():
                setattr(metric, state, value.clone())

    def _metrics(self) -> dict[str, Metric]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Metric)}


_COUNTERS = ("samples", "tokens", "latent_cells", "model_flops", "seconds", "rank_seconds")


def _seconds_per_step(window: RankTimes) -> dict[str, float]:
    """Where the time of the mean rank goes. What all ranks wait is the exchange itself; beyond it they wait for one."""
    steps = len(window.micro_batches)
    wait = window.part("wait")
    reduction = wait.amin(dim=0).sum() / steps
    named = {name: window.part(name).mean(dim=0).sum() / steps for name in ("compute", "data", "exchange", "optimizer")}
    seconds = named | {"reduction": reduction, "straggler": wait.mean(dim=0).sum() / steps - reduction}
    return {f"time/{name}": float(value) for name, value in seconds.items()}
