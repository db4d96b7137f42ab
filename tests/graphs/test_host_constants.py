"""Copies from the host while a forward is captured. Torch's "meta" is the device here: copies to it are told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.graphs.capture import gradients_of
from lightning_videoscale.graphs.host_constants import HostConstants, differ

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
        lambda: torch.tensor(data=[1.0, 2.0, 3.0], device=DEVICE),
        lambda: torch.as_tensor([1.0, 2.0, 3.0], device=DEVICE),
        lambda: there().new_tensor([1.0, 2.0, 3.0]),
        lambda: torch.ones(3).type_as(there()),
    ],
)
def test_what_is_copied_from_the_host_is_kept_and_may_be_written_into(copy: Callable[[], Tensor]) -> None:
    beside = Beside()
    with HostConstants(DEVICE, beside) as constants:
        copied = copy()
        copied += 1
    assert beside.times >= 1 and not beside.is_inside
    [kept] = constants.kept
    assert copied.device == kept.device == DEVICE and copied.dtype == kept.dtype and copied is not kept


def test_what_is_written_into_memory_of_the_graph_is_written_by_the_graph() -> None:
    beside, target = Beside(), there()
    with HostConstants(DEVICE, beside) as constants:
        result = target.copy_(torch.arange(3))
    assert result is target and target.dtype is torch.float32
    [constant] = constants.kept
    assert constant.device == DEVICE and constant is not target


@pytest.mark.parametrize(
    ("index", "copies"),
    [
        ([0, -1], 1),
        ([True, False, True], 1),
        ((slice(None), [2, 0, 0]), 1),
        (([0, 1], [1, 0]), 2),
        (torch.tensor([[1, 0]]), 1),
        (torch.eye(3, 4, dtype=torch.bool), 2),
        ((..., None, torch.tensor([3])), 1),
        ((0, slice(1, 3)), 0),
        ((torch.tensor(1), 2), 0),
        (None, 0),
    ],
    ids=str,
)
def test_an_index_on_the_host_is_a_constant(index: Any, copies: int) -> None:
    table, cpu = torch.arange(12).view(3, 4), torch.device("cpu")  # the device here, so that numbers can be compared
    written = torch.zeros_like(table)
    with HostConstants(cpu, Beside()) as constants:
        found = table[index]
        assert len(constants.kept) == copies
        written[index] = found
    assert torch.equal(found, table[index]) and torch.equal(written[index], found)


def test_what_is_on_the_device_already_is_left_to_the_graph() -> None:
    beside = Beside()
    with HostConstants(DEVICE, beside) as constants:
        x = there()
        _ = x.to(torch.float64), x.to(DEVICE), torch.arange(3, device=DEVICE), x.copy_(there())
        _ = torch.tensor([1.0]) + torch.ones(1).double()  # on the host alone
    assert constants.kept == []
    assert torch.tensor([1.0]).device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, there()[0]], device="cpu"),
        lambda: torch.as_tensor([[there()[0]]], device=DEVICE),
        lambda: there().new_tensor(there()),
    ],
)
def test_what_is_made_of_numbers_on_the_device_is_no_constant(make: Callable[[], Tensor]) -> None:
    beside = Beside()
    with HostConstants(DEVICE, beside), contextlib.suppress(RuntimeError):  # "meta" has no numbers
        make()
    assert beside.times == 0


def test_constants_are_compared() -> None:
    def of(*rows: Tensor) -> HostConstants:
        constants = HostConstants(DEVICE, Beside())
        constants.kept += rows
        return constants

    one, nan = torch.ones(2, 2).T, torch.full((1,), float("nan"))
    assert not differ(of(one, nan), of(one.clone(), nan.clone()))
    assert not differ(of(torch.empty(0)), of(torch.empty(0)))
    for other in (of(one), of(nan, one), of(one, nan + 1, nan), of(one.double(), nan), of(2 * one, nan)):
        assert differ(of(one, nan), other)


def test_what_a_checkpoint_copies_again_is_seen() -> None:
    weight = torch.empty(3, device=DEVICE, requires_grad=True)

    def scaled(x: Tensor) -> Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0], device=DEVICE)).sin()

    with HostConstants(DEVICE, Beside()) as constants:
        out = checkpoint(scaled, weight * 2, use_reentrant=False, preserve_rng_state=False)
        assert len(constants.kept) == 1
        [gradient] = gradients_of([out], [weight], [torch.ones_like(out)])
    assert gradient is not None and len(constants.kept) == 2


def test_backward_copies_what_forward_has_and_nothing_is_copied_to_the_host() -> None:
    """Of activations that wait on the host, a graph would copy what was there before."""
    constants = HostConstants(torch.device("cpu"), Beside())
    with constants:
        torch.tensor([1.0, 2.0], device="cpu")
        constants.end_forward()
        torch.tensor([1.0, 2.0], device="cpu")
        with pytest.raises(RuntimeError, match="what its forward has not"):
            torch.tensor([1.0, 3.0], device="cpu")
    with HostConstants(DEVICE, Beside()), pytest.raises(RuntimeError, match="copies to the host"):
        torch.empty(2).copy_(torch.empty(2, device=DEVICE))
