"""Arguments of strategies that are wrong are errors that name them, with the value, before anything runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.strategies.deepspeed import SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.network_changes import check_present
from lightning_videoscale.strategies.parent import StrategyPart

STRATEGIES = [SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"compile": "max-autotune"}, r"compile='max-autotune'.*torch\.compile"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing='full'"),
        ({"verify_plan": None}, "verify_plan=None"),
        ({"save_frozen": "no"}, "save_frozen='no'"),
        ({"modules": "transformer"}, r"modules='transformer'.*modules=\['transformer'\]"),
        ({"modules": [1]}, r"modules=\[1\]"),
        ({"timeout": 600}, r"timeout=600.*timedelta"),
    ],
)
def test_other_types(strategy: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        strategy(**wrong)


@pytest.mark.parametrize("share", [1.5, -0.5, 30, float("nan")])
def test_a_share_of_the_blocks_that_there_is_not(share: float) -> None:
    with pytest.raises(ValueError, match=f"activation_checkpointing={share}"):
        SequenceParallelDDPStrategy(activation_checkpointing=share)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["ulysses_size", "ring_size", "sp_size"])
@pytest.mark.parametrize("size", ["2", 2.0, "most"])
def test_sizes_that_are_no_whole_numbers(strategy: Any, name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={size!r}.*whole number.*'auto'"):
        strategy(**{name: size})


def test_what_fits_is_taken() -> None:
    for strategy in STRATEGIES:
        strategy(compile={"dynamic": False}, modules=["transformer"], save_frozen=None, timeout=timedelta(minutes=1))
        strategy(timeout=None)


def test_arguments_that_nobody_takes() -> None:
    """Lightning's DDPStrategy takes any, which torch would refuse when the model is wrapped."""
    with pytest.raises(TypeError, match=r"SequenceParallelDDPStrategy.*ulyses_size=2.*ulysses_size="):
        SequenceParallelDDPStrategy(ulyses_size=2)
    with pytest.raises(TypeError, match=r"nothing_like_it=1"):
        SequenceParallelDDPStrategy(nothing_like_it=1)
    SequenceParallelDDPStrategy(find_unused_parameters=True, static_graph=True, process_group_backend="gloo")


@pytest.mark.parametrize("replicas", [0, "two", 1.5])
def test_replicas(replicas: Any) -> None:
    with pytest.raises(ValueError, match=rf"replicas={replicas!r}.*whole number"):
        SequenceParallelFSDP2Strategy(replicas=replicas)


def test_frozen_networks_by_path() -> None:
    with pytest.raises(TypeError, match=r"shard_frozen=\['teacher'\]"):
        SequenceParallelFSDP2Strategy(shard_frozen="teacher")  # type: ignore[arg-type]
    module = nn.ModuleDict({"transformer": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"shard_frozen.*\['techer'\].*\['transformer'\]"):
        check_present("shard_frozen", ["techer"], module)
    check_present("shard_frozen", ["transformer"], module)


@pytest.mark.parametrize(
    "kind", [SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy, SequenceParallelDeepSpeedStrategy]
)
def test_all_parts_of_a_strategy_come_before_lightnings_classes(kind: type) -> None:
    """Else what they override is never called."""
    order = kind.__mro__
    parts = [part for part in order if issubclass(part, StrategyPart) and part is not StrategyPart]
    assert all(order.index(part) < order.index(Strategy) for part in parts), [part.__name__ for part in order]
