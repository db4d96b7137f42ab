"""ComputeCV against values computed by hand."""

import math

import pytest
import torch

from lightning_videoscale.metrics import ComputeCV


def test_std_over_mean_of_the_physical_load() -> None:
    cv = ComputeCV()
    cv.update(torch.tensor([1, 3]), torch.tensor([10, 10]))  # loads 100, 300: std 100, mean 200
    assert cv.compute().item() == 0.5
    cv.update(torch.tensor([4, 1]), torch.tensor([100, 200]))  # both 40 000
    assert cv.compute().item() == 0.25


def test_the_exponent_decides_what_is_balanced() -> None:
    tokens = ComputeCV(p=1.0)
    tokens.update(torch.tensor([4, 1]), torch.tensor([100, 400]))
    assert tokens.compute().item() == 0.0
    square = ComputeCV(p=2.0)
    square.update(torch.tensor([4, 1]), torch.tensor([100, 400]))  # 40 000, 160 000: std 60 000, mean 100 000
    assert square.compute().item() == pytest.approx(0.6, rel=1e-15)


def test_accumulated_micro_batches_add_up() -> None:
    cv = ComputeCV()
    cv.update(torch.tensor([[1, 3], [3, 1]]), torch.tensor([[10, 10], [10, 10]]))
    assert cv.compute().item() == 0.0


def test_several_steps_at_once_are_several_steps() -> None:
    cv = ComputeCV()
    # The second step has one micro-batch less: loads 100 and 300; then 400 and 400.
    cv.update(torch.tensor([[[1, 0], [3, 1]], [[3, 0], [1, 3]]]), torch.tensor([[[10, 0], [10, 10]]] * 2))
    assert cv.compute().item() == 0.25 and cv.steps == 2


def test_long_videos_do_not_overflow() -> None:
    cv = ComputeCV(p=2.4)
    cv.update(torch.tensor([1, 1]), torch.tensor([2_000_000, 2_000_000]))
    assert cv.compute().item() == 0.0


def test_states_merge_by_adding() -> None:
    first, rest = ComputeCV(), ComputeCV()
    first.update(torch.tensor([1, 3]), torch.tensor([10, 10]))
    rest.update(torch.tensor([1, 1]), torch.tensor([10, 10]))
    first.merge_state(rest)
    assert first.compute().item() == 0.25


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nan_before_the_first_step() -> None:
    assert math.isnan(ComputeCV().compute())


@pytest.mark.parametrize(
    ("batch_sizes", "sequence_lengths", "message"),
    [
        (torch.ones(2), torch.ones(3), r"got \(2,\) and \(3,\)"),
        (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), r"got \(1, 1, 1, 1\)"),
        (torch.zeros(2), torch.ones(2), r"above zero; got B \* S\*\*p = \[\[0.0, 0.0\]\]"),
        (torch.tensor([[[1], [0]]]), torch.ones(1, 2, 1), r"above zero; got B \* S\*\*p = \[\[1.0\], \[0.0\]\]"),
    ],
)
def test_refuses_what_is_not_one_load_per_rank(
    batch_sizes: torch.Tensor, sequence_lengths: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ComputeCV().update(batch_sizes, sequence_lengths)
