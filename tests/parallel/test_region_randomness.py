"""The generators in and outside of a split region; see also tests/distributed/parallel/test_dropout.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_videoscale.parallel.region_randomness import RegionRandomness, RegionsEntered

CPU = torch.device("cpu")


@pytest.mark.parametrize("begins", ["before", "inside"])
def test_a_held_region_ends_with_what_holds_it(begins: str) -> None:
    """An argument of the network that is split has begun it before; its forward, replayed, ends nothing."""
    randomness, before = RegionRandomness(1), torch.get_rng_state()
    seed = randomness.enter(CPU) if begins == "before" else None
    with randomness.held(CPU) as inside:
        assert (seed is None) != (inside is None)
        drawn = torch.rand(2)
        randomness.leave()  # as a gather in it does
        assert not torch.equal(torch.rand(2), drawn)
    assert torch.equal(torch.get_rng_state(), before)
    assert randomness.drew_on_host


def test_the_generators_outside_are_seen_from_inside() -> None:
    randomness, before = RegionRandomness(0), torch.get_rng_state()
    assert torch.equal(randomness.outside(CPU)[0], before)
    randomness.enter(CPU)
    assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(randomness.outside(CPU)[0], before)
    randomness.leave()
    torch.rand(1)
    assert not torch.equal(randomness.outside(CPU)[0], before)


def test_whether_the_host_draws_is_known_inside_and_after() -> None:
    randomness = RegionRandomness(0)
    randomness.enter(CPU)
    assert not randomness.drew_on_host
    torch.rand(1)
    assert randomness.drew_on_host
    randomness.leave()
    assert randomness.drew_on_host
    randomness.enter(CPU)
    assert not randomness.drew_on_host
    randomness.leave()
    assert not randomness.drew_on_host


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_capture_draws_is_put_back_in_and_outside_of_a_region(is_inside: bool) -> None:
    randomness, outside = RegionRandomness(0), torch.get_rng_state()
    if is_inside:
        randomness.enter(CPU)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with randomness.put_back(CPU), randomness.held(CPU):
        torch.rand(1), random.random(), np.random.rand()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]
    with randomness.held(CPU) as seed:  # the replay
        assert (seed is None) == is_inside
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), outside)


def test_two_networks_of_a_mesh_draw_other_numbers_from_one_state() -> None:
    entered, state, drawn = RegionsEntered(), torch.get_rng_state(), []
    for randomness in (RegionRandomness(0, entered), RegionRandomness(0, entered), RegionRandomness(0)):
        torch.set_rng_state(state)
        with randomness.held(CPU):
            drawn.append(torch.rand(4))
    student, teacher, alone = drawn
    assert not torch.equal(student, teacher) and torch.equal(student, alone)
