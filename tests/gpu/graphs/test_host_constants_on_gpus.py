"""Forwards that copy from the host: by graphs where what they copy is constant, else eager, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.graphs.training import SHAPES, both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_algorithms"),
]
STEPS = 6


def scaled_by(scale: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], None]:
    """A change of a network: what comes into its block is scaled first."""

    def change(network: Any) -> None:
        block = network.blocks[3]
        original = block.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(hidden * scale(network, hidden).to(hidden.dtype), *args, **kwargs)

        block.forward = forward

    return change


def table(_: Any, hidden: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, hidden.shape[-1]).to(hidden.device)


def written_into(_: Any, hidden: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 0.5], device=hidden.device)
    scale += 0.25
    return scale[1]


def copied_into(_: Any, hidden: Tensor) -> Tensor:
    return torch.empty(hidden.shape[-1], device=hidden.device).copy_(torch.linspace(0.5, 1.5, hidden.shape[-1]))


def index(_: Any, hidden: Tensor) -> Tensor:
    scales = torch.linspace(0.5, 1.5, 4, device=hidden.device)
    return scales[[0, -1]].sum() + scales[torch.tensor([2])]


def pinned(_: Any, hidden: Tensor) -> Tensor:
    """Copied without a wait, from memory that is given back at once."""
    table = torch.linspace(0.5, 1.5, hidden.shape[-1]).pin_memory().to(hidden.device, non_blocking=True)
    torch.zeros(hidden.shape[-1]).pin_memory()
    return table


def table_of_checkpoints(network: Any) -> None:
    scaled_by(table)(network)
    network.enable_gradient_checkpointing()


CONSTANT = {
    "table": scaled_by(table),
    "written into": scaled_by(written_into),
    "copied into": scaled_by(copied_into),
    "index": scaled_by(index),
    "pinned": scaled_by(pinned),
    "recomputed": table_of_checkpoints,
}


@pytest.mark.parametrize("change", CONSTANT.values(), ids=CONSTANT)
def test_what_is_constant_is_copied_once(change: Callable[[Any], None]) -> None:
    eager, other, runs = both(change)
    for number in range(STEPS):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == STEPS - 2


def of_its_own_generator(network: Any, hidden: Tensor) -> Tensor:
    network.draws = getattr(network, "draws", None) or torch.Generator().manual_seed(0)
    return torch.rand(hidden.shape[-1], generator=network.draws).to(hidden.device)


def of_numpy(network: Any, hidden: Tensor) -> Tensor:
    network.draws = getattr(network, "draws", None) or np.random.default_rng(0)
    return torch.from_numpy(network.draws.random(hidden.shape[-1], dtype=np.float32)).to(hidden.device)


ELSEWHERE = np.random.default_rng(0)


def of_elsewhere(_: Any, hidden: Tensor) -> Tensor:
    """Drawn by a generator that no attribute of the network leads to."""
    return torch.from_numpy(ELSEWHERE.random(hidden.shape[-1], dtype=np.float32)).to(hidden.device)


def of_the_device(_: Any, hidden: Tensor) -> Tensor:
    return torch.tensor([1.0, hidden.detach().abs().max()], device=hidden.device)[0]


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (of_its_own_generator, "draws random numbers on the host"),
        (of_numpy, "draws random numbers on the host"),
        (of_elsewhere, "differs between two calls"),
        (of_the_device, "its capture failed"),
    ],
)
def test_what_is_not_constant_stays_eager(
    scale: Callable[[Any, Tensor], Tensor], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, other, runs = both(scaled_by(scale))
    for number in range(STEPS):
        other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 0
    assert reason in capsys.readouterr().out


def test_a_table_on_the_host_that_changes_is_read_anew() -> None:
    def of_attribute(network: Any, hidden: Tensor) -> Tensor:
        scale: Tensor = network.scale.to(hidden.device)
        return scale

    def change(network: Any) -> None:
        network.scale = torch.ones(1)
        scaled_by(of_attribute)(network)

    eager, other, runs = both(change)
    for number in range(2 * STEPS):
        if number == STEPS:
            for training in (eager, other):
                training.network.scale.data.fill_(0.5)  # type: ignore[operator]
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["captured"] == 2
