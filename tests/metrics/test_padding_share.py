"""PaddingShare against values computed by hand."""

import math

import pytest
import torch

from lightning_videoscale.metrics import PaddingShare


def test_share_of_tokens_that_carry_nothing() -> None:
    padding = PaddingShare()
    padding.update(torch.tensor([60, 90]), torch.tensor([100, 100]))  # 50 of 200
    assert padding.compute().item() == 0.25
    padding.update(torch.tensor(0), torch.tensor(200))  # a filler: 250 of 400
    assert padding.compute().item() == 0.625
    assert padding.compute().dtype == torch.float64


def test_a_long_run_loses_no_token() -> None:
    padding = PaddingShare()
    padding.update(torch.tensor(0), torch.tensor(2**30))
    padding.update(torch.tensor(2**30), torch.tensor(2**30 + 1))  # float32 would drop the one
    assert padding.compute().item() == (2**30 + 1) / (2**31 + 1)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nan_before_the_first_step_and_after_reset() -> None:
    padding = PaddingShare()
    assert math.isnan(padding.compute())
    padding.update(torch.tensor(1), torch.tensor(2))
    padding.reset()
    assert math.isnan(padding.compute())


def test_refuses_more_use_than_work() -> None:
    with pytest.raises(ValueError, match=r"got \[3\] of \[2\]"):
        PaddingShare().update(torch.tensor([3]), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"got \(2,\) and \(\)"):
        PaddingShare().update(torch.ones(2), torch.tensor(2))
