"""Which calls a graph can serve, and which of them are alike."""

from __future__ import annotations

import multiprocessing
from enum import Enum
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
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


class Settings:
    """Equal to nothing but itself, whatever becomes of its scale."""

    scale = 1.0


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("argument", [Settings(), Unhashable(), {1, 2}, print], ids=lambda x: type(x).__name__)
def test_objects_that_may_change_are_no_key(argument: Any) -> None:
    assert type(argument).__name__ in str(read(argument))


class Mode(Enum):
    FAST = "fast"


@pytest.mark.parametrize("argument", [1, 2.0, 1j, "text", b"", None, True, Mode.FAST, torch.bfloat16, torch.Size([2])])
def test_what_cannot_change_is_a_key(argument: Any) -> None:
    assert isinstance(read([argument], {"by": argument}), NetworkCall)


def set_matmul_precision() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def set_convolutions_precision() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def reduce_in_bfloat16() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def deterministic_convolutions() -> None:
    torch.backends.cudnn.deterministic = True


def double_by_default() -> None:
    torch.set_default_dtype(torch.float64)


def other_backend() -> None:
    tiny_wan().set_attention_backend("_native_math")  # of this network, and the active one from then on


CHANGES = [
    set_matmul_precision,
    set_convolutions_precision,
    reduce_in_bfloat16,
    deterministic_convolutions,
    double_by_default,
    other_backend,
]


def keys_after(connection: Any) -> None:
    keys = [_key(), *((change(), _key())[1] for change in CHANGES)]  # type: ignore[func-returns-value]
    connection.send([before != after for before, after in pairwise(keys)])


def _key() -> Any:
    call = read(1)
    assert isinstance(call, NetworkCall)
    return call.key


def test_switches_of_libraries_are_part_of_the_key() -> None:
    here, there = multiprocessing.Pipe()
    # In a process of its own, since torch takes some back in part only, and not forked from one that has threads.
    process = multiprocessing.get_context("spawn").Process(target=keys_after, args=(there,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert dict(zip((change.__name__ for change in CHANGES), here.recv(), strict=True)) == {
        change.__name__: True for change in CHANGES
    }


class Counting(TorchFunctionMode):
    """Sees every call of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_follows_each_operation_sees_the_network_run() -> None:
    assert not is_observed()
    with torch.autograd.graph.save_on_cpu():
        assert is_observed()
    with FlopCounterMode(display=False):
        assert is_observed()
    with Counting():
        assert is_observed()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert is_observed()
    hook.remove()
    assert not is_observed()


def test_a_default_device_follows_nothing() -> None:
    with torch.device("cpu"):
        assert not is_observed()


@pytest.mark.parametrize(
    ("arguments", "value"),
    [({"mode": "always"}, "always"), ({"max_memory": 5.0}, "5.0"), ({"max_memory": "30%"}, "30%")],
)
def test_options_are_checked(arguments: dict[str, Any], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        GraphOptions(**arguments)
