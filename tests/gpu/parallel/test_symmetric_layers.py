"""Thousands of layers over the symmetric transport, exact to the bit: by CUDA graphs and eagerly, with random delays.

What one rank replays its peers may run eagerly. Steps that fail in the middle are followed by `reset`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_videoscale.graphs.recorder import Recorder
from lightning_videoscale.parallel import SequenceMesh
from tests.distributed.pool import ProcessPool
from tests.parallel.exact_layers import CALLS, DisturbedTransport, ExactLayers, failure_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]
LAYERS, DEPTH = 10_000, 50
EAGER = 0.05  # of a rank's steps


class Steps:
    """Steps of a few layers, eagerly or by a graph that was captured of one.

    Args:
        depth: Layers of a step.
        disturbance: Comes before exchanges, in those that are captured, too.
    """

    def __init__(self, depth: int, disturbance: Callable[[], None] = lambda: None) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
        # Two slots, which are soon used again.
        self.transport = DisturbedTransport.create(mesh, device, timedelta(seconds=60))
        self.transport.disturbance = disturbance
        self.rank, self.size = mesh.ulysses.rank, mesh.ulysses.size
        self.layers = ExactLayers(mesh.ulysses, depth, device)
        self.inputs = self.layers.draw(0)
        recorder = Recorder(device)
        with recorder.stream():
            self.run()  # takes memory and loads kernels
            torch.cuda.synchronize()
            with recorder.recording() as self.graph:
                self._replayed = self.run()

    def draw(self, number: int) -> None:
        for static, drawn in zip(self.inputs, self.layers.draw(number), strict=True):
            static.copy_(drawn)

    def run(self) -> Tensor:
        """Whether something was wrong; the host does not wait."""
        return self.layers.are_wrong(self.inputs, self.transport)

    def attempt(self) -> None:
        """A step of which nobody looks at the numbers."""
        self.layers.run(self.layers.mine(self.inputs), self.transport)

    def replay(self) -> Tensor:
        """As `run`."""
        self.graph.replay()
        return self._replayed.clone()


class Delay:
    """Holds this rank's stream, and now and then its host, up at random.

    Args:
        seed: Of the numbers that are drawn.
    """

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)
        torch.cuda._sleep(1)  # loads the kernel

    def __call__(self, often: float = 0.02) -> None:
        if self._draws.random() < often:
            torch.cuda._sleep(self._draws.randrange(2_000_000))  # cycles, about a millisecond
        if self._draws.random() < often / 10:
            time.sleep(self._draws.random() * 0.005)


def wrong_steps() -> tuple[list[int], int]:
    """Which steps had a wrong number, and how many this rank ran eagerly."""
    delay, draws = Delay(dist.get_rank()), random.Random(100 + dist.get_rank())
    steps = Steps(DEPTH, delay)
    wrong, eager = [], 0
    for number in range(LAYERS // DEPTH):
        steps.draw(number)
        delay(often=0.3)
        by_graph = draws.random() >= EAGER
        eager += not by_graph
        wrong.append(steps.replay() if by_graph else steps.run())
    return _true(wrong), eager


def _true(found: Sequence[Tensor]) -> list[int]:
    numbers: list[int] = torch.stack(list(found)).nonzero().flatten().tolist()
    return numbers


@pytest.mark.parametrize("size", [2, 4])
def test_ten_thousand_checkpointed_layers_with_random_delays(gpu_ranks: Ranks, size: int) -> None:
    for wrong, eager in gpu_ranks(size).run(wrong_steps):
        assert wrong == [] and 0 < eager < LAYERS // DEPTH // 5


def wrong_steps_after_failures(count: int) -> list[int]:
    """A rank raises somewhere in the middle of a step, eagerly, while its peers run the step or replay it.

    Devices are still at the step before then, one of them late.
    """
    # Few layers: a host that has filled the queue of a stuck device cannot go on to `reset`.
    depth, draws = 2, random.Random(1)  # which are alike on all ranks
    steps = Steps(depth)
    found = [steps.run()]  # takes memory of this stream: nothing may wait for a device that is stuck
    torch.cuda._sleep(1)  # loads the kernel
    torch.cuda.synchronize()
    for number in range(count):
        steps.draw(number)
        failing, calls = draws.randrange(steps.size), draws.randrange(depth * CALLS)
        if steps.rank == failing:
            steps.transport.disturbance = failure_after(calls)
            with pytest.raises(torch.OutOfMemoryError):
                steps.attempt()
            steps.transport.disturbance = lambda: None
        elif number % 2:
            steps.replay()
        else:
            steps.attempt()
        steps.transport.reset()
        found.append(steps.replay())
        if steps.rank == number % steps.size:
            torch.cuda._sleep(20_000_000)  # cycles, some milliseconds
        found.append(steps.run())
    return _true(found)


@pytest.mark.parametrize("size", [2, 4])
def test_layers_and_graphs_are_exact_after_reset(gpu_ranks: Ranks, size: int) -> None:
    assert gpu_ranks(size).run(wrong_steps_after_failures, 40) == [[]] * size
