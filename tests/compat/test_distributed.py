"""Process groups and symmetric memory of the installed torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_videoscale.compat.torch import distributed
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
CPU = torch.device("cpu")


def exchanged() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    message = torch.arange(3.0) + 10 * rank  # 1 element to rank 0, 2 to rank 1
    uneven, even = torch.empty(2 * (1 + rank)), torch.empty(2)
    distributed.run_all_to_all(uneven, message, [1 + rank] * 2, [1, 2], dist.group.WORLD)
    distributed.run_all_to_all(even, message[:2].clone(), [], [], dist.group.WORLD)
    return uneven.tolist(), even.tolist()


def test_pieces_reach_their_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(exchanged) == [([0, 10], [0, 10]), ([1, 2, 11, 12], [1, 11])]


def test_a_name_of_a_group_is_given_again() -> None:
    for size in (2, 3):
        group = dist.ProcessGroup(dist.HashStore(), 0, size)
        distributed.register_group("tests/compat/again", group)
        found = torch._C._distributed_c10d._resolve_process_group("tests/compat/again")  # type: ignore[arg-type]
        assert found.size() == size
        distributed.unregister_group("tests/compat/again")
        with pytest.raises(RuntimeError):
            torch._C._distributed_c10d._resolve_process_group("tests/compat/again")  # type: ignore[arg-type]


def test_cpus_have_no_symmetric_memory() -> None:
    """It takes our arguments all the same, and is not missing."""
    for call in (lambda: distributed.empty_symmetric(16, CPU), lambda: distributed.map_peers(torch.ones(16), "none")):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert raised.type is RuntimeError
    assert distributed.symmetric_backend(CPU) is None
