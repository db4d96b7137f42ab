"""Nothing in a family's forward stands against CUDA graphs, as far as a machine without a GPU can tell.

What is captured is a forward inside the network's hooks. It may not draw numbers on the host nor keep anything, and the
region of random numbers, which some families enter before it, ends with it also where it is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_flatten
from lightning_videoscale.graphs import GraphedNetwork, GraphOptions, calls
from lightning_videoscale.graphs.calls import NetworkCall, read_call
from lightning_videoscale.graphs.inspection import inspect_call
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.auxiliary_loss import context_of
from tests.distributed.families.harness import Case, run
from tests.distributed.families.test_parity import FAMILIES, FUSED, LENGTHS, one_of_each_kind
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
CPU = torch.device("cpu")


class Watched:
    """Stands in front of a network's forward, as graphs do: the second call is inspected, the third as if replayed."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._forward = network, network.forward
        self._calls = 0
        self.objections: list[str | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = context_of(self._network)
        assert context is not None
        if context.suspended or context.on_exchange:  # a rehearsal of the plan
            return self._forward(*args, **kwargs)
        self._calls += 1
        if self._calls == 2:
            self.objections.append(read_call(self._network, args, kwargs))  # type: ignore[arg-type]
            leaves, structure = tree_flatten((args, kwargs))
            call = NetworkCall(None, leaves, structure, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
            result, seen = inspect_call(
                self._network, lambda: self._forward(*args, **kwargs), call, (args, kwargs), context, CPU
            )
            self.objections.append(seen.objection)
            return result
        with context.randomness.held(CPU) if self._calls == 3 else contextlib.nullcontext():
            return self._forward(*args, **kwargs)


def objections(cases: list[Case]) -> list[tuple[list[str | None], bool, bool]]:
    """Of each case: what was said, whether the last two calls agree, and whether they left the generator alone."""
    found = []
    for case in cases:
        network, inputs = FAMILIES[case.family].model(case), FAMILIES[case.family].inputs(case, 0)
        if case.fused:
            inject_fused_kernels(network)
        with SequenceMesh.create("cpu", ulysses_size=case.mesh[2], ring_size=case.mesh[1]) as mesh:
            undo = parallelize(network, mesh, verify_plan=False, schedule=case.schedule)
            network.forward = watched = Watched(network)
            before = torch.get_rng_state()
            results = [run(network, inputs)[1].item() for _ in range(3)]
            undo()
            found.append((watched.objections, results[1] == results[2], torch.equal(before, torch.get_rng_state())))
    return found


@pytest.mark.parametrize("family", one_of_each_kind(FAMILIES))
def test_a_family_can_run_by_graphs(ranks: Ranks, family: str) -> None:
    cases = [
        Case(family, (1, 1, 2), {**LENGTHS[0], **variant}, place % 2 == 0, float32=True, fused=family in FUSED)
        for place, variant in enumerate(FAMILIES[family].variants)
    ]
    for of_rank in ranks(2).run(objections, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert found == (["an input is on cpu", None], True, True), case


def test_tables_that_are_given_and_read_whole_stay_eager(ranks: Ranks) -> None:
    """A capture would look for the whole of a slice by its address, and its inputs are elsewhere."""
    case = Case("allegro", (1, 1, 2), LENGTHS[0], float32=True, schedule="sliced")
    for [(said, agree, _)] in ranks(2).run(objections, [case]):
        assert said[1] is not None and "tables of all tokens" in said[1] and agree


class Settling(GraphedNetwork):
    """Computes what it would replay, and notes the calls in which ranks agree on what is captured."""

    settled: list[int]

    def _settle(self, *_: Any) -> None:
        self.settled = [*getattr(self, "settled", []), self.counts["eager"]]

    def _inspected(self, kind: Any, call: NetworkCall, context: Any, args: Any, kwargs: Any) -> Any:
        return self._eagerly("eager", args, kwargs)


def calls_to_agree(family: str, lengths: list[dict[str, Any]]) -> list[int]:
    cases = [Case(family, (1, 1, 2), settings, float32=True) for settings in lengths]
    network = FAMILIES[family].model(cases[0])
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, patch.object(calls, "DEVICE", "cpu"):
        undo = parallelize(network, mesh, verify_plan=False)
        options = GraphOptions(True)
        network.forward = runs = Settling(network, network.forward, [], options, list, int, int, True, print)
        for case in cases * 4:
            run(network, FAMILIES[family].inputs(case, 0))
        undo()
    return runs.settled


@pytest.mark.parametrize("short", [{"frames": 4}, {"frames": 5, "text": 1}])
def test_ranks_agree_in_the_same_calls_where_only_one_has_slices_of_equal_length(
    ranks: Ranks, short: dict[str, Any]
) -> None:
    """Of 5 tokens and of 4, the second rank has 2; of 1 token of text and of 2, each rank has one."""
    lengths = {"frames": 5, "side": 1, "text": 2}
    first, second = ranks(2).run(calls_to_agree, "flux", [lengths, lengths | short])
    assert first == second == [4, 5]
