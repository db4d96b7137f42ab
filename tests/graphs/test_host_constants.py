"""Copies from the host while a forward is captured. Torch's "meta" is the device here: copies to it are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_videoscale.graphs.host_constants import HostConstants

DEVICE = torch.device("meta")


class Beside:
    """Counts how often something is done beside the capture, and is there meanwhile."""

    def __init__(self) -> None:
        self.times, self.is_inside = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.times, self.is_inside = self.times + 1, True
        yield
        self.is_inside = False


def there() -> Tensor:
    return torch.empty(3, device=DEVICE)


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.ones(3).to(DEVICE),
        lambda: torch.ones(3).to(there()),
        lambda: torch.ones(3).to(torch.float64).to(device=DEVICE, dtype=torch.float16),
        lambda: torch.tensor([1.0, 2.0, 3.0], device=DEVICE),
        lambda: torch.as_tensor([1.0, 2.0, 3.0], device=DEVICE),
        lambda: there().new_tensor([1.0, 2.0, 3.0]),
        lambda: torch.ones(3).type_as(there()),
    ],
)
def test_what_is_copied_from_the_host_is_kept(copy: Callable[[], Tensor]) -> None:
    beside = Beside()
    with HostConstants(DEVICE, beside) as constants:
        copied = copy()
        again = copied * 2
    assert beside.times >= 1 and not beside.is_inside
    assert [x is copied for x in constants.kept] == [True]
    assert again.device == DEVICE


def test_what_is_written_into_memory_of_the_graph_is_written_by_the_graph() -> None:
    beside, target = Beside(), there()
    with HostConstants(DEVICE, beside) as constants:
        result = target.copy_(torch.arange(3))
    assert result is target and target.dtype is torch.float32
    [constant] = constants.kept
    assert constant.device == DEVICE and constant is not target


def test_what_is_on_the_device_already_is_left_to_the_graph() -> None:
    beside = Beside()
    with HostConstants(DEVICE, beside) as constants:
        x = there()
        _ = x.to(torch.float64), x.to(DEVICE), torch.arange(3, device=DEVICE), x.copy_(there())
        _ = torch.tensor([1.0]) + torch.ones(1).double()  # on the host alone
    assert constants.kept == []
    assert torch.tensor([1.0]).device.type == "cpu"
