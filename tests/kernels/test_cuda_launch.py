"""A launch hands the driver configuration and argument as C lays them out; a stand-in for the driver reads them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.launch import Kernel


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Argument(ctypes.Structure):
    """Of a kernel with layout "Pqif"."""

    _fields_ = [("p", ctypes.c_void_p), ("q", ctypes.c_longlong), ("i", ctypes.c_int), ("f", ctypes.c_float)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reached the driver."""
    seen: list[tuple[Any, ...]] = []

    def launch(config: int, function: int, parameters: int, extra: None) -> int:
        c = Config.from_address(config)
        a = Argument.from_address(ctypes.c_void_p.from_address(parameters).value or 0)
        attributes = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.attribute_count)]
        seen.append((function, [*c.grid], [*c.block], c.shared_bytes, c.stream, attributes, (a.p, a.q, a.i, a.f)))
        return 1 if c.grid[0] > 100 else 0

    def ok(value: object) -> Callable[..., tuple[int, object]]:
        return lambda *arguments: (0, value)

    driver = Mock(cuCtxGetCurrent=ok(1), cuModuleLoadData=ok(2), cuModuleGetFunction=ok(77))
    driver.cuFuncSetAttribute = lambda *arguments: (0,)
    driver.CUresult = int
    monkeypatch.setattr(toolkit, "driver", lambda: driver)
    monkeypatch.setattr(toolkit, "launch_kernel", lambda: launch)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x5000, raising=False)
    return seen


def test_the_driver_reads_what_was_meant(launches: list[tuple[Any, ...]]) -> None:
    kernel = Kernel(b"", "name", "Pqif", 0, shared_bytes=49152)
    kernel((5, 2, 1), (32, 4, 1), 0x7F00_0000_0010, -3, 7, 0.5)
    expected = (77, [5, 2, 1], [32, 4, 1], 49152, 0x5000, [], (0x7F00_0000_0010, -3, 7, 0.5))
    assert launches == [expected]


def test_an_early_launch_says_so(launches: list[tuple[Any, ...]]) -> None:
    Kernel(b"", "name", "Pqif", 0, early=True)((1, 1, 1), (32, 1, 1), 16, 0, 0, 0.0)
    assert launches[0][5] == [(6, 1)]  # programmatic stream serialization, allowed


def test_a_launch_in_clusters_says_so(launches: list[tuple[Any, ...]]) -> None:
    for early in (False, True):
        Kernel(b"", "name", "Pqif", 0, early=early)((8, 1, 1), (32, 1, 1), 16, 0, 0, 0.0, cluster=4)
    assert [launch[5] for launch in launches] == [[(4, 4)], [(6, 1), (4, 4)]]  # cluster dimension


def test_an_empty_grid_launches_nothing_and_a_refusal_raises(launches: list[tuple[Any, ...]]) -> None:
    kernel = Kernel(b"", "name", "Pqif", 0)
    kernel((0, 1, 1), (32, 1, 1), 16, 0, 0, 0.0)
    assert launches == []
    with pytest.raises(toolkit.CudaUnavailableError, match=r"grid \(101, 1, 1\).*16, 0, 0, 0\.0"):
        kernel((101, 1, 1), (32, 1, 1), 16, 0, 0, 0.0)
