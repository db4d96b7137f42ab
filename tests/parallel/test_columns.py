"""Columns of several ranks that come to lie beside each other, on threads that stand for ranks and streams."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport
from tests.parallel.ranks_on_threads import ThreadInterconnect, World, axis_of, on_threads


@pytest.mark.parametrize("size", [2, 3])
def test_columns_of_all_ranks_come_to_lie_beside_each_other(size: int) -> None:
    """Several on their way, of uneven rows and columns, with delays; a slot is used again once all have read theirs."""
    shapes = random.Random(size)
    cases = [
        (
            [shapes.randint(0, 9) for _ in range(size)],
            [shapes.randint(1, 5) * multiple for _ in range(size)],  # of four, 16 bytes: copied as such
            shapes.randint(1, 3),
        )
        for multiple in [1, 4] * 20
    ]

    def matrix(lengths: Sequence[int], samples: int, widths: Sequence[int], number: int) -> Tensor:
        """Of all ranks' rows and columns."""
        generator = torch.Generator().manual_seed(number)
        return torch.randn(samples, sum(lengths), sum(widths), generator=generator)

    def work(transport: SymmetricTransport, rank: int) -> None:
        axis = axis_of(rank, size)
        for number, (lengths, widths, samples) in enumerate(cases):
            wholes = [matrix(lengths, samples, widths, 10 * number + i) for i in range(1 + number % 4)]
            mine = [whole.split(widths, 2)[rank].transpose(0, 1).contiguous() for whole in wholes]
            coming = [transport.begin_columns(columns, lengths, widths, axis) for columns in mine]
            for each, whole in zip(coming, wholes, strict=True):
                found = each.wait()
                assert found.is_contiguous() and torch.equal(found, whole.split(lengths, 1)[rank])
                each.done()

    on_threads(size, work)


@pytest.mark.parametrize("guard", [True, False])
def test_columns_stay_until_their_reader_is_done(guard: bool) -> None:
    """Rank 0 reads late; its peer, which has read, goes on with the same slot."""
    world = World(2, guard)

    def work(rank: int) -> list[float]:
        axis, shape = axis_of(rank, 2), ([2, 2], [1, 1])
        transport = SymmetricTransport(ThreadInterconnect(world, rank), axis, slots=1)
        first = transport.begin_columns(torch.full((4, 1, 1), 1.0), *shape, axis)
        seen = first.wait()
        if rank == 1:
            first.done()
            second = transport.begin_columns(torch.full((4, 1, 1), 2.0), *shape, axis)
            if not guard:
                second._copied.wait()
                world.meet(-1, rank, None)
                return []
        elif guard:
            time.sleep(0.2)
            held = seen.flatten().tolist()
            first.done()
            second = transport.begin_columns(torch.full((4, 1, 1), 2.0), *shape, axis)
            second.wait()
            return held
        else:
            world.meet(-1, rank, None)
            return seen.flatten().tolist()
        second.wait()
        return []

    with ThreadPoolExecutor(2) as pool:
        of_0, _ = (future.result() for future in [pool.submit(work, rank) for rank in range(2)])
    # Without the guard, its peer's columns are already those of the next exchange.
    assert of_0 == ([1.0] * 4 if guard else [1.0, 2.0] * 2)


def test_columns_that_are_not_what_was_said_are_refused() -> None:
    def work(transport: SymmetricTransport, rank: int) -> None:
        axis = axis_of(rank, 2)
        with pytest.raises(ValueError, match=r"\(5, 1, 2\).*\(4, 1, 2\)"):
            transport.begin_columns(torch.zeros(4, 1, 2), [2, 3], [2, 2], axis)
        with pytest.raises(ValueError, match=r"contiguous.*\(1, 4, 4\)"):
            transport.begin_columns(torch.zeros(2, 1, 4).transpose(0, 2), [2, 2], [2, 2], axis)
        coming = transport.begin_columns(torch.zeros(4, 1, 2), [2, 2], [2, 2], axis)
        coming.wait()
        coming.done()
        with pytest.raises(RuntimeError, match="not pending"):
            coming.done()

    on_threads(2, work)
