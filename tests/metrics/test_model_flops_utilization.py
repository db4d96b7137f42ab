"""ModelFlopsUtilization against values computed by hand."""

import math

import pytest
import torch

from lightning_videoscale.metrics import ModelFlopsUtilization


def test_flops_over_seconds_and_peak() -> None:
    utilization = ModelFlopsUtilization(peak_flops_per_second=1e15)
    utilization.update(flops=2e15, seconds=4.0)
    assert utilization.compute().item() == 0.5
    utilization.update(flops=1e15, seconds=8.0)  # 3e15 in 12 s
    assert utilization.compute().item() == 0.25
    assert utilization.compute().dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nan_before_the_first_step_and_after_reset() -> None:
    utilization = ModelFlopsUtilization(1.0)
    assert math.isnan(utilization.compute())
    utilization.update(1.0, 1.0)
    utilization.reset()
    assert math.isnan(utilization.compute())


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"above zero; got 0\.0"):
        ModelFlopsUtilization(0.0)
    with pytest.raises(ValueError, match=r"got -1\.0 in 1\.0 s"):
        ModelFlopsUtilization(1.0).update(-1.0, 1.0)
    with pytest.raises(ValueError, match=r"got 1\.0 in 0\.0 s"):
        ModelFlopsUtilization(1.0).update(1.0, 0.0)
