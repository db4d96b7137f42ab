"""PhysicalLoad against values computed by hand."""

import math

import pytest
import torch

from lightning_videoscale.metrics import PhysicalLoad


def _values(load: PhysicalLoad) -> tuple[float, float]:
    values = load.compute()
    return values["mean"].item(), values["max"].item()


def test_mean_and_largest_of_samples_times_length_squared() -> None:
    load = PhysicalLoad()
    load.update(torch.tensor([4, 1]), torch.tensor([100, 400]))  # 40 000, 160 000
    assert _values(load) == (100_000.0, 160_000.0)
    load.update(torch.tensor([1, 1]), torch.tensor([100, 300]))  # 10 000, 90 000
    assert _values(load) == (75_000.0, 160_000.0)


def test_accumulated_micro_batches_add_up() -> None:
    load = PhysicalLoad()
    load.update(torch.tensor([[1, 3], [2, 0]]), torch.tensor([[10, 10], [10, 10]]))  # 400, 200
    assert _values(load) == (300.0, 400.0)


def test_several_steps_at_once_are_several_steps() -> None:
    load = PhysicalLoad()
    load.update(torch.tensor([[[1, 3], [2, 0]]]), torch.tensor([[[10, 10], [10, 0]]]))  # 400, then 200
    assert _values(load) == (300.0, 400.0)


def test_one_token_more_shows_in_long_videos() -> None:
    load = PhysicalLoad()
    load.update(torch.tensor([1]), torch.tensor([2_000_001]))
    assert _values(load) == (2_000_001.0**2, 2_000_001.0**2)


def test_states_merge() -> None:
    first, rest = PhysicalLoad(), PhysicalLoad()
    first.update(torch.tensor([1]), torch.tensor([10]))
    rest.update(torch.tensor([3]), torch.tensor([10]))
    first.merge_state(rest)
    assert _values(first) == (200.0, 300.0)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_empty_before_the_first_step_and_after_reset() -> None:
    load = PhysicalLoad()
    load.update(torch.tensor([1]), torch.tensor([10]))
    load.reset()
    mean, largest = _values(load)
    assert math.isnan(mean) and largest == 0.0


@pytest.mark.parametrize(("shape", "other"), [((2,), (3,)), ((1, 1, 1, 1), (1, 1, 1, 1)), ((0,), (0,))])
def test_refuses_what_is_not_one_load_per_rank(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must both have shape"):
        PhysicalLoad().update(torch.ones(shape), torch.ones(other))
