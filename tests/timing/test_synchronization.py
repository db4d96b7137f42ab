"""Which calls of a strategy are timed, and what happens where a framework has other ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_videoscale.parallel import CollectiveTransport
from lightning_videoscale.timing.synchronization import synchronizing_calls


def strategy(**parts: Any) -> Any:
    network = nn.Linear(1, 1)
    return SimpleNamespace(**({"model": network, "lightning_module": network} | parts))


def test_a_single_device_waits_for_nobody() -> None:
    assert list(synchronizing_calls(strategy())) == []


def test_exchanges_of_the_transport() -> None:
    transport = CollectiveTransport()
    calls = list(synchronizing_calls(strategy(transport=transport)))
    assert calls == [(transport, name, "exchange") for name in ("exchange", "wait", "all_gather")]


def test_zero_by_stage() -> None:
    class DeepSpeedZeroOptimizer:
        def reduce_ipg_grads(self) -> None: ...

    class BF16_Optimizer:
        """Reduces at the end of backward, which is told apart without it."""

    first, other = DeepSpeedZeroOptimizer(), BF16_Optimizer()
    calls = synchronizing_calls(strategy(deepspeed_engine=SimpleNamespace(optimizer=first)))
    assert list(calls) == [(first, "reduce_ipg_grads", "wait")]
    assert list(synchronizing_calls(strategy(deepspeed_engine=SimpleNamespace(optimizer=other)))) == []


def test_a_framework_without_the_calls_is_an_error_that_names_them() -> None:
    class DeepSpeedZeroOptimizer:
        """Of a version to come."""

    engine = SimpleNamespace(optimizer=DeepSpeedZeroOptimizer())
    with pytest.raises(RuntimeError, match=r"has no \['reduce_ipg_grads'\]. Install versions"):
        list(synchronizing_calls(strategy(deepspeed_engine=engine)))
