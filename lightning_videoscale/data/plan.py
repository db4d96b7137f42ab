"""Which samples meet in which micro-batch, on which data-parallel rank, in which step.

A plan is a pure function of the samples' shapes, the settings, the seed and the epoch. Every rank computes all of it
and takes its own part; no rank asks another. Words used here: a *step* is one optimizer step, made of ``micro_batches``
micro-batches on each of ``dp_size`` data-parallel ranks; a *slot* is one place for a micro-batch in a step.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.batch import BatchMeta

LossWeighting = Literal["sample", "none"]


def sequence_length(shape: tuple[int, int, int], patch_size: tuple[int, int, int]) -> int:
    """Tokens S of one sample.

    Args:
        shape: Frames, height and width of its latents.
        patch_size: Latent frames, rows and columns that make one token.

    Raises:
        ValueError: If the latents cannot be cut into whole patches.
    """
    if any(side % patch for side, patch in zip(shape, patch_size, strict=True)):
        raise ValueError(
            f"Latents of (frames, height, width) = {shape} cannot be cut into patches of {patch_size}: every side must "
            "be a multiple. Crop or resize such clips when the shards are written, or give the model's own patch_size."
        )
    return math.prod(shape) // math.prod(patch_size)


class MicroBatch(NamedTuple):
    """What one rank reads at once: positions in the index, all of one latent shape, and the plan's word about them."""

    samples: tuple[int, ...]
    meta: BatchMeta


@dataclass(frozen=True)
class EpochPlan:
    """One epoch.

    Attributes:
        steps: ``steps[s][r][k]`` is micro-batch k of data-parallel rank r in step s.
    """

    steps: tuple[tuple[tuple[MicroBatch, ...], ...], ...]

    def micro_batches_of(self, dp_rank: int) -> list[MicroBatch]:
        """What one data-parallel rank trains on, in order. Equally many for every rank."""
        return [micro_batch for step in self.steps for micro_batch in step[dp_rank]]

    def digest(self) -> str:
        """SHA-256 of the whole plan, the same on all ranks or something is wrong."""
        return hashlib.sha256(repr(self.steps).encode()).hexdigest()


class _Draft(NamedTuple):
    """A micro-batch before it has a place. ``filler`` repeats a sample in a slot that would stay empty."""

    samples: tuple[int, ...]
    sequence_length: int
    cost: float
    filler: bool = False


@dataclass(frozen=True)
class BucketPlanner:
    """Buckets by latent shape, micro-batches by equation 2, every sample exactly once per epoch.

    Args:
        shapes: Latent shape (frames, height, width) of every sample of the index.
        budget: Samples per micro-batch, by sequence length.
        patch_size: Latent frames, rows and columns that make one token.
        dp_size: Number of data-parallel ranks R.
        micro_batches: Micro-batches K per rank and step.
        loss_weighting: ``sample``: every sample of a step has the same weight in its gradient. ``none``: every
            micro-batch has.
        seed: Seed of all permutations.
        shuffle: Whether every epoch is a new permutation; else samples stay in the order of the index within a bucket.

    Raises:
        ValueError: If R or K is less than 1; when planning, if a shape is no multiple of the patch size.
    """

    shapes: Sequence[tuple[int, int, int]]
    budget: BucketBudget
    patch_size: tuple[int, int, int] = (1, 2, 2)
    dp_size: int = 1
    micro_batches: int = 1
    loss_weighting: LossWeighting = "sample"
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.dp_size < 1:
            raise ValueError(f"micro_batches={self.micro_batches} and dp_size={self.dp_size} must be at least 1.")

    def plan(self, epoch: int) -> EpochPlan:
        """Plans one epoch. The number of steps is the same for every epoch."""
        draws = _Draws(self.seed, epoch) if self.shuffle else None
        order = draws.permutation(len(self.shapes)) if draws else range(len(self.shapes))
        drafts = self._fill_slots(self._cut(order))
        drafts = [drafts[i] for i in draws.permutation(len(drafts))] if draws else sorted(drafts)
        slots = self.dp_size * self.micro_batches
        groups = (drafts[i : i + slots] for i in range(0, len(drafts), slots))
        return EpochPlan(tuple(self._deal(group, draws.below(self.dp_size) if draws else 0) for group in groups))

    def needs_loss_weights(self) -> bool:
        """Whether any epoch may hold a loss weight other than 1."""
        metas = [m.meta for step in self.plan(epoch=0).steps for rank in step for m in rank]
        uneven = len({meta.samples for meta in metas}) > 1 and self.dp_size * self.micro_batches > 1
        return any(meta.loss_weight == 0 for meta in metas) or (uneven and self.loss_weighting == "sample")

    def _cut(self, order: Sequence[int]) -> list[_Draft]:
        """Cuts each bucket into micro-batches of the size that the budget allows."""
        buckets: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for sample in order:
            buckets[self.shapes[sample]].append(sample)
        drafts = []
        for shape, samples in buckets.items():
            length = sequence_length(shape, self.patch_size)
            size = self.budget.batch_size(length)
            drafts += [self._draft(samples[i : i + size], length) for i in range(0, len(samples), size)]
        return drafts

    def _draft(self, samples: Sequence[int], length: int) -> _Draft:
        return _Draft(tuple(samples), length, self.budget.cost(len(samples), length))

    def _fill_slots(self, drafts: list[_Draft]) -> list[_Draft]:
        """Brings the number of micro-batches to a multiple of the slots of a step.

        The costliest micro-batches are halved until it fits; when only single samples are left, the cheapest one is
        repeated with weight 0, so that no rank ever has a step less than another.
        """
        missing = -len(drafts) % (self.dp_size * self.micro_batches)
        heap = [(-draft.cost, i, draft) for i, draft in enumerate(drafts) if len(draft.samples) > 1]
        whole = [draft for draft in drafts if len(draft.samples) == 1]
        heapq.heapify(heap)
        while missing and heap:
            _, _, draft = heapq.heappop(heap)
            middle = (len(draft.samples) + 1) // 2
            for samples in (draft.samples[:middle], draft.samples[middle:]):
                half = self._draft(samples, draft.sequence_length)
                if len(samples) > 1:
                    heapq.heappush(heap, (-half.cost, len(drafts) + samples[0], half))
                else:
                    whole.append(half)
            missing -= 1
        whole += [draft for _, _, draft in sorted(heap)]
        fillers = [min(whole, key=lambda draft: draft.cost)._replace(filler=True)] * missing
        return whole + fillers

    def _deal(self, drafts: list[_Draft], first_rank: int) -> tuple[tuple[MicroBatch, ...], ...]:
        """Deals the micro-batches of one step: the costliest first, each to the rank that has least and has room."""
        hands: list[list[_Draft]] = [[] for _ in range(self.dp_size)]
        loads = [0.0] * self.dp_size
        for draft in sorted(drafts, key=lambda draft: -draft.cost):
            open_hands = (r for r in range(self.dp_size) if len(hands[r]) < self.micro_batches)
            rank = min(open_hands, key=loads.__getitem__)
            hands[rank].append(draft)
            loads[rank] += draft.cost
        # Ties always fall to the first rank: without the rotation it would get the costliest micro-batch of every step.
        hands = hands[first_rank:] + hands[:first_rank]
        samples_of_step = sum(len(draft.samples) for draft in drafts if not draft.filler)
        return tuple(tuple(self._micro_batch(draft, samples_of_step) for draft in hand) for hand in hands)

    def _micro_batch(self, draft: _Draft, samples_of_step: int) -> MicroBatch:
        slots, samples = self.dp_size * self.micro_batches, len(draft.samples)
        weight = samples * slots / samples_of_step if self.loss_weighting == "sample" else 1.0
        frames, height, width = self.shapes[draft.samples[0]]
        weight = 0.0 if draft.filler else weight
        meta = BatchMeta(frames, height, width, draft.sequence_length, samples, draft.cost, weight)
        return MicroBatch(draft.samples, meta)


class _Draws:
    """Random numbers that are the same on every machine: raw bits of a generator whose stream never changes."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))

    def permutation(self, n: int) -> list[int]:
        keys = self._bits.random_raw(n)
        return list(map(int, np.argsort(keys, kind="stable")))

    def below(self, n: int) -> int:
        return int(self._bits.random_raw() % n)
