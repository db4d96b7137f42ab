"""Do all ranks come to the same exchanges? One forward pass in which they ask each other before each: `ExchangeWatch`.

Without it, ranks that go other ways wait for each other until a timeout, which cannot say why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_videoscale.parallel.context import SequenceContext

_END = "the end of its forward pass"


class ExchangeWatch:
    """Makes what one rank meets in a forward pass an error of all ranks.

    Args:
        name: Of the network.
        context: Of the split network; tells of the exchanges.
        group: The ranks that run the pass together; all ranks if left out.
    """

    def __init__(self, name: str, context: SequenceContext, group: ProcessGroup | None = None) -> None:
        self._name, self._context, self._group, self._over = name, context, group, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, ranks agree before each exchange, and at the end.

        Raises:
            ValueError: On all ranks, if one of them has an objection, goes to another exchange, or has failed.
        """
        self._over, self._context.on_exchange = False, self._meet
        try:
            yield
        except BaseException:
            self._finish(repr(sys.exception()))
            raise
        finally:
            self._context.on_exchange = None
        self._finish(None)

    def _finish(self, error: str | None) -> None:
        if not self._over:
            self._meet(_END, error)

    def _meet(self, path: str, objection: str | None) -> None:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (path, objection), group=self._group)
        if path == _END or len(set(everyone)) > 1 or objection is not None:
            self._over = True  # all ranks have heard the same, and none will ask again
        if path == _END and objection is not None:  # this rank's own error is raised already
            return
        said = [
            (dist.get_global_rank(self._group, rank) if self._group else rank, *what)
            for rank, what in enumerate(everyone)
        ]
        objections = [f"rank {rank} at {where}: {why}" for rank, where, why in said if why is not None]
        if objections:
            raise ValueError(
                f"{self._name} does not run where its sequence is split. {'; '.join(dict.fromkeys(objections))}"
            )
        if len({where for _, where, _ in said}) > 1:
            places = ", ".join(f"rank {rank} came to {where}" for rank, where, _ in said)
            raise ValueError(
                f"The ranks of {self._name} went different ways: {places}. What its attention calls must not depend "
                "on what differs between ranks, such as how much of a text's padding a rank has."
            )
