"""Which calls a graph can serve, and which of them are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_videoscale.graphs import GraphOptions
from lightning_videoscale.graphs.calls import NetworkCall, is_observed, read_call
from tests.models import tiny_wan


def read(*args: Any, **kwargs: Any) -> NetworkCall | str:
    return read_call(tiny_wan(), args, kwargs)


def test_tensors_must_be_on_a_gpu() -> None:
    assert read(torch.ones(2, 3)) == "an input is on cpu"


def test_what_is_no_tensor_is_part_of_the_key() -> None:
    one, same, other = read(1.0, return_dict=False), read(1.0, return_dict=False), read(2.0, return_dict=False)
    assert isinstance(one, NetworkCall)
    assert isinstance(same, NetworkCall)
    assert isinstance(other, NetworkCall)
    assert one.key == same.key != other.key


def test_the_modes_of_torch_are_part_of_the_key() -> None:
    with_gradients = read(1)
    with torch.no_grad():
        without = read(1)
    assert isinstance(with_gradients, NetworkCall)
    assert isinstance(without, NetworkCall)
    assert with_gradients.key != without.key


def test_objects_that_cannot_be_compared_are_no_key() -> None:
    class Settings:
        __hash__ = None  # type: ignore[assignment]

    assert "Settings" in str(read(Settings()))


def test_what_follows_each_operation_sees_the_network_run() -> None:
    assert not is_observed()
    with torch.autograd.graph.save_on_cpu():
        assert is_observed()
    with FlopCounterMode(display=False):
        assert is_observed()
    assert not is_observed()


@pytest.mark.parametrize(
    ("arguments", "value"),
    [({"mode": "always"}, "always"), ({"max_memory": 5.0}, "5.0"), ({"max_memory": "30%"}, "30%")],
)
def test_options_are_checked(arguments: dict[str, Any], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        GraphOptions(**arguments)
