"""Random numbers inside the split region of a model, such as those of dropout.

All ranks of a group enter the region with equal generators. Left alone, every rank would drop the same elements of its
slice, a pattern that repeats along the sequence; and slices of different length would leave the generators different.
So each rank draws from a stream of its own inside the region and finds its generators unchanged after it, as Megatron
does with dropout over split sequences (Korthikanti et al., Reducing Activation Recomputation, 2022, section 4).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_videoscale.compat.torch.autograd import in_backward

_RECOMPUTED = (
    "A checkpoint around the whole network computes it again, and it draws random numbers, such as those of dropout. "
    "They would be others than in its forward pass. Checkpoint its blocks instead, by activation_checkpointing=True or "
    "the network's own gradient checkpointing, or set its dropout to 0."
)

GeneratorStates = tuple[Tensor, Tensor | None]
"""Of the CPU's generator of torch, and of a device's, None unless that is a GPU."""


class RegionSeed(NamedTuple):
    """What a pass draws from in its region: digest of the generator outside, and seed of this rank's stream."""

    origin: bytes
    seed: int


class RegionsEntered:
    """How many regions were entered from one state of the CPU's generator.

    Attributes:
        origin: Digest of that state.
        number: Of the last region, from 0.
    """

    def __init__(self) -> None:
        self.origin, self.number = b"", 0

    def count(self, origin: bytes) -> int:
        """Returns the number of a region that is entered from a state."""
        self.number = self.number + 1 if origin == self.origin else 0
        self.origin = origin
        return self.number


class RegionRandomness:
    """The generators of torch, CPU and one device, in and outside of one model's split region.

    A region's stream follows from the CPU generator's state outside, the number of regions entered from that state, by
    whichever network, and the rank. It hence repeats where a run resumes, and differs between two passes of one step,
    of one network or of two. Layers that draw one decision for the whole sequence, such as stochastic depth, must do so
    from another generator: in the region, ranks draw differently.

    Args:
        rank: This rank's position in the group that shares the sequence.
        entered: Counts, for all networks that the group runs; left out: this one is alone.
    """

    def __init__(self, rank: int, entered: RegionsEntered | None = None) -> None:
        self._rank = rank
        self._entered = RegionsEntered() if entered is None else entered
        self._outside: tuple[Tensor, torch.device, Tensor | None] | None = None
        self._is_held = False
        self._begun: GeneratorStates | None = None
        self._drew = False, False

    @property
    def drew_on_host(self) -> bool:
        """Whether the region drew random numbers from the CPU's generator, so far or when it was last left."""
        return (self._drew if self._outside is None else self._has_drawn(self._outside[1]))[0]

    @property
    def drew_on_device(self) -> bool:
        """Whether it drew from the device's generator."""
        return (self._drew if self._outside is None else self._has_drawn(self._outside[1]))[1]

    def _has_drawn(self, device: torch.device) -> tuple[bool, bool]:
        assert self._begun is not None
        return differing(self._begun, _states(device))

    def outside(self, device: torch.device) -> GeneratorStates:
        """Returns the generators of torch as they are outside of the region, also while inside.

        Returns:
            States of the CPU's and of ``device``'s, the latter None unless it is a GPU.
        """
        if self._outside is not None:
            return self._outside[0], self._outside[2]
        return _states(device)

    def enter(self, device: torch.device) -> RegionSeed | None:
        """Begins this rank's own stream, and returns its seed; without effect inside the region (None).

        Raises:
            RuntimeError: If a checkpoint around the network computes it again, and it draws random numbers.
        """
        if self._outside is not None:
            return None
        if any(self._drew) and in_backward():  # in which place of the step the pass was, nothing tells
            raise RuntimeError(_RECOMPUTED)
        origin = _digest(torch.get_rng_state())
        number = self._entered.count(origin)
        place = origin + number.to_bytes(8, "little") + self._rank.to_bytes(8, "little")
        seed = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1
        self._begin(device, seed)
        return RegionSeed(origin, seed)

    def enter_again(self, device: torch.device, seed: RegionSeed) -> None:
        """Begins the stream of an earlier pass whose entrance is recomputed; without effect anywhere else in it.

        Checkpoints bring back the generators as they were, so at the entrance they are as outside.
        """
        if self._outside is None and _digest(torch.get_rng_state()) == seed.origin:
            self._begin(device, seed.seed)

    def _begin(self, device: torch.device, seed: int) -> None:
        state, device_state = _states(device)
        self._outside = state, device, device_state
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        self._begun = _states(device)

    def leave(self) -> None:
        """Puts the generators back as they were before; without effect outside the region."""
        if self._outside is None or self._is_held:
            return
        state, device, device_state = self._outside
        self._drew = self._has_drawn(device)
        self._outside = None
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)

    @contextmanager
    def held(self, device: torch.device) -> Iterator[RegionSeed | None]:
        """All that runs inside is one region, of which `enter` and `leave` change nothing; yields what `enter` does.

        It ends here also where it began before, as where an argument of the network itself was split.
        """
        seed, self._is_held = self.enter(device), True
        try:
            yield seed
        finally:
            self._is_held = False
            self.leave()

    @contextmanager
    def put_back(self, device: torch.device) -> Iterator[None]:
        """Afterwards all generators (torch's, NumPy's, Python's), the region and the next one's stream are as now."""
        numpy_state, python_state = np.random.get_state(), random.getstate()
        torch_state, device_state = _states(device)
        region, place = (self._outside, self._begun), (self._entered.origin, self._entered.number)
        try:
            yield
        finally:
            self._outside, self._begun = region
            self._entered.origin, self._entered.number = place
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)


def differing(before: GeneratorStates, after: GeneratorStates) -> tuple[bool, bool]:
    """Whether the CPU's generator has moved between two states, and whether the device's has."""
    (host, device), (host_now, device_now) = before, after
    has_moved = device is not None and device_now is not None and not torch.equal(device, device_now)
    return not torch.equal(host, host_now), has_moved


def _states(device: torch.device) -> GeneratorStates:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes()).digest()
