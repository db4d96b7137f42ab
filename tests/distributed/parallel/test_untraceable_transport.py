"""Compiled blocks exchange over a transport that compilers cannot trace: by ops, one graph, as eager blocks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_videoscale.parallel import Axis, SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.transport import CollectiveTransport
from lightning_videoscale.strategies.blocks import checkpoint_activations
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.parallel.test_compiled_families import LENGTHS, run
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]


class Untraceable(CollectiveTransport):
    """Collectives that count what is exchanged, and none of it is traced."""

    traceable = False

    def __init__(self) -> None:
        self.elements: list[int] = []

    def exchange(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        """Notes the elements of each message."""
        self._note(message)
        return super().exchange(message, send, receive, axis)

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Any:
        """Likewise."""
        self._note(message)
        return super().all_to_all(message, send, receive, axis)

    def _note(self, message: Tensor) -> None:
        assert not torch.compiler.is_compiling() and type(message) is Tensor
        self.elements.append(message.numel())


def compiled(family: str, schedule: ScheduleName, checkpointing: bool) -> tuple[float, list[int], list[list[int]]]:
    """The largest error, how many graphs there are after each length, and the messages by eager and compiled code."""
    compiler = CompileCounterWithBackend("aot_eager")
    eager, model = (FAMILIES[family].model(Case(family, settings=LENGTHS[0], float32=True)) for _ in range(2))
    transports = Untraceable(), Untraceable()
    errors, graphs = [], []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for network, transport in zip((eager, model), transports, strict=True):
            parallelize(network, mesh, transport=transport, schedule=schedule, verify_plan=False)
        compile_blocks(model, {"backend": compiler, "fullgraph": True})
        for network in (eager, model):
            if checkpointing:
                checkpoint_activations(network)
        for lengths in LENGTHS[:3]:
            inputs = dict(FAMILIES[family].inputs(Case(family, settings=lengths, float32=True), 0))
            expected, got = run(eager, inputs), run(model, inputs)
            errors += [float((x - y).norm() / y.norm()) for x, y in zip(got[0], expected[0], strict=True)]
            errors.append(gradient_error(got[1], expected[1]))
            graphs.append(compiler.frame_count)
    return max(errors), graphs, [transport.elements for transport in transports]


@pytest.mark.parametrize(
    ("family", "schedule", "checkpointing"),
    [
        ("cogvideox", "serial", False),
        pytest.param("wan", "serial", True, marks=pytest.mark.full),
        pytest.param("wan", "sliced", False, marks=pytest.mark.full),
        pytest.param("wan", "overlap", True, marks=pytest.mark.full),
        pytest.param("ltx", "serial", True, marks=pytest.mark.full),
    ],
)
def test_messages_are_those_of_eager_blocks(
    ranks: Ranks, family: str, schedule: ScheduleName, checkpointing: bool
) -> None:
    for error, graphs, (by_eager, by_compiled) in ranks(2).run(compiled, family, schedule, checkpointing):
        assert error < 1e-5 and graphs == [1, 2, 2]
        assert by_compiled == by_eager != []
