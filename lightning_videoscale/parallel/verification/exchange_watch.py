"""Do all ranks come to the same exchanges, and to all? One forward pass in which they ask before each: `ExchangeWatch`.

Without it, ranks that go other ways wait for each other until a timeout, which cannot say why. Attention that is
computed around its exchange, by another library's function for example, would see a rank's own tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lightning_videoscale.parallel.verification.trial_run import SplitNetwork
from lightning_videoscale.ranks import gather_over_ranks

_END = "the end of its forward pass"


class ExchangeWatch:
    """Makes an objection or error of one rank in a forward pass an error on all ranks, of a group or of the job."""

    def __init__(self, split: SplitNetwork, group: ProcessGroup | None = None) -> None:
        self._name, self._network, self._context, self._group = split.name, split.network, split.context, group
        self._over = False
        self._used: set[str] = set()
        self._exchanged: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, ranks agree before each exchange, and at the end.

        Raises:
            ValueError: On all ranks, if one of them has an objection, goes to another exchange, or has failed, or if an
                attention module that the plan names is computed and has not exchanged. Modules that do not run at all,
                as in blocks that are dropped at random, have nothing to exchange.
        """
        self._over, self._context.on_exchange = False, self._compare
        try:
            with self._following_attention():
                yield
        except BaseException as error:
            if not self._over:
                self._agree(_END, repr(error))  # which this rank raises itself
            raise
        finally:
            self._context.on_exchange = None
        if not self._over:
            self._compare(_END, self._without_exchange())

    @contextmanager
    def _following_attention(self) -> Iterator[None]:
        """Notes of which attention modules something inside runs, such as the projections.

        A hook may call a module and skip its computation. One that has nothing inside computes when it is called.
        """
        self._used, self._exchanged = set(), set()
        owner: dict[nn.Module, str] = {}
        for path, module in self._context.attention.items():
            owner |= dict.fromkeys(_inside(module), path)
            with suppress(AttributeError):  # what a user has put there since
                owner |= dict.fromkeys(_inside(self._network.get_submodule(path)), path)

        def note(module: nn.Module, _: Any) -> None:
            if module in owner:
                self._used.add(owner[module])

        handle = nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _without_exchange(self) -> str | None:
        around = sorted(self._used - self._exchanged)
        if not around:
            return None
        return (
            f"{', '.join(around[:3])}{' and others' * (len(around) > 3)} ran without exchanging, so that each rank's "
            "tokens saw none of the others'. Attention must run in the forward of the module that the split plan "
            "names, by torch's scaled_dot_product_attention (in diffusers the backend 'native'), or by attention=."
        )

    def _compare(self, path: str, objection: str | None) -> None:
        self._exchanged.add(path)
        said = self._agree(path, objection)
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

    def _agree(self, path: str, objection: str | None) -> list[tuple[int, str, str | None]]:
        """What every rank says."""
        everyone = gather_over_ranks((path, objection), self._group)
        if path == _END or len(set(everyone)) > 1 or objection is not None:
            self._over = True  # all ranks have heard the same, and none will ask again
        return [
            (dist.get_global_rank(self._group, rank) if self._group else rank, *what)
            for rank, what in enumerate(everyone)
        ]


def _inside(module: nn.Module) -> list[nn.Module]:
    """All modules in it, or itself if there are none."""
    return [*module.modules()][1:] or [module]
