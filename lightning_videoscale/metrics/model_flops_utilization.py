"""Model FLOPs utilization: which share of the device's arithmetic the model itself uses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.metrics.ratio import Ratio


class ModelFlopsUtilization(Ratio):
    """MFU = model FLOPs / (seconds · peak FLOP/s), of one device.

    Model FLOPs are those of one forward and one backward pass. What activation checkpointing computes again is no
    progress and does not count (PaLM, appendix B); `cost.training_flops` leaves it out. Over several steps, and over
    several ranks when synced, it is all FLOPs over all seconds.

    Example:
        >>> utilization = ModelFlopsUtilization(peak_flops_per_second=1e15)
        >>> utilization.update(flops=2e15, seconds=4.0)
        >>> utilization.compute().item()
        0.5
    """

    sums = ("flops", "seconds")
    higher_is_better = True

    flops: Tensor
    seconds: Tensor

    def __init__(self, peak_flops_per_second: float, **kwargs: Any) -> None:
        """Creates an empty metric.

        Args:
            peak_flops_per_second: What the device's data sheet promises for the dtype of the matrix products, dense,
                for example 989e12 for bfloat16 on an H100 or H200.
            **kwargs: See `Ratio`.

        Raises:
            ValueError: ``peak_flops_per_second`` is not above zero.
        """
        super().__init__(**kwargs)
        if not peak_flops_per_second > 0:
            raise ValueError(f"peak_flops_per_second must be above zero; got {peak_flops_per_second}.")
        self.peak_flops_per_second = peak_flops_per_second

    def update(self, flops: float, seconds: float) -> None:
        """Adds one step of this device.

        Args:
            flops: Model FLOPs of this device's share of the step; see `cost.training_flops`.
            seconds: Time of the step, above zero.

        Raises:
            ValueError: ``flops`` is negative, or ``seconds`` is not above zero.
        """
        if not (flops >= 0 and seconds > 0):
            raise ValueError(f"flops must not be negative and seconds must be above zero; got {flops} in {seconds} s.")
        self.flops += flops
        self.seconds += seconds

    def compute(self) -> Tensor:
        """Returns the MFU, a float64 scalar, 1 at the peak; NaN before the first step."""
        return super().compute() / self.peak_flops_per_second
