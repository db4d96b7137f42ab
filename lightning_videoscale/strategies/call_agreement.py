"""Do all ranks call the same of several networks? A LightningModule may hold two experts, chosen by the timestep.

Where a network's parameters are sharded, each call gathers them from all ranks; elsewhere backward averages what was
called. Ranks that call different networks then mix the shards, or the gradients, of both: experts of one size are
silently wrong, others hang. So the ranks tell each other what they call, before they wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_videoscale.parallel.mesh import host_group
from lightning_videoscale.ranks import gather_over_ranks


class CallAgreement:
    """Compares what ranks call: before each call where that gathers parameters, and before each backward.

    Collective over all ranks, as are its comparisons; they cost a message on the host.

    Args:
        networks: By path, those whose parameters ranks share; at least two.
        before_calls: Whether a call waits for other ranks.
        timeout: How long a comparison waits for a rank.
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, before_calls: bool, timeout: timedelta) -> None:
        self._before_calls = before_calls
        self._called: dict[str, None] = {}  # with gradients since the last backward, in the order of first calls
        with ExitStack() as undo:
            self._group = undo.enter_context(host_group(timeout))
            for path, network in networks.items():
                undo.callback(network.register_forward_pre_hook(self._hook(path, network), prepend=True).remove)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Takes the hooks back and closes the group."""
        self._undo.close()

    def check_backward(self) -> None:
        """Raises a ``ValueError`` on all ranks if they have called different networks since the last backward."""
        called, self._called = list(self._called), {}
        self._compare(f"backward through {', '.join(called) or 'none of them'}")

    def forget(self) -> None:
        """A backward that nobody waits for."""
        self._called = {}

    def _hook(self, path: str, network: nn.Module) -> Callable[..., None]:
        def hook(called: nn.Module, _: Any) -> None:
            if called is not network:  # a copy, such as an average, which has the hook too
                return
            if torch.is_grad_enabled():
                self._called[path] = None
            if self._before_calls:
                self._compare(path)

        uncompiled: Callable[..., None] = torch.compiler.disable(hook)
        return uncompiled

    def _compare(self, mine: str) -> None:
        everyone = gather_over_ranks(mine, self._group)
        if len(set(everyone)) == 1:
            return
        places = {where: [rank for rank, theirs in enumerate(everyone) if theirs == where] for where in everyone}
        listed = ", ".join(f"ranks {ranks} came to {where}" for where, ranks in places.items())
        raise ValueError(
            f"The ranks call different networks of the LightningModule: {listed}. All ranks share the networks' "
            f"{'parameters' if self._before_calls else 'gradients'}, so all must call the same ones in the same order. "
            "Choose the network by what is equal on all ranks, such as trainer.global_step, and draw the timestep in "
            "its range; or use SequenceParallelDDPStrategy(find_unused_parameters=True), whose groups may differ."
        )
