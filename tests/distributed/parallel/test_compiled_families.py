"""Blocks whose streams are split by a plan are one graph each, and two of them serve all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.parallel.test_ring import needs_traced_ring
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error
from tests.support.record import confirm

Ranks = Callable[[int], ProcessPool]

LENGTHS: list[dict[str, Any]] = [{"frames": 2 + n, "text": 5 + 3 * n % 7} for n in range(10)]
"""Of more buckets than Dynamo compiles anew for; over two ranks video and text are even or not.

The first three have both kinds, too."""

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "cogvideox": [{}, {"rotary": False, "text": 7}],  # whose table of positions has the text, too
    "consisid": [{"face": False, "text": 7}],
    "hunyuan_video": [{}],
    "ltx": [{"times": "token"}],
    "ltx2": [{}, {"rope": "split", "times": "token"}],
    "wan": [{}],
}


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs = [x for x in model(**inputs).values() if isinstance(x, Tensor)]
    torch.stack([x.square().mean() for x in outputs]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in outputs], gradients


def compiled(
    family: str, mesh_sizes: tuple[int, int], settings: dict[str, Any], lengths: list[dict[str, Any]]
) -> tuple[list[float], list[int]]:
    """Errors of output and gradients at each length, and how many graphs there are after it."""
    ring, ulysses = mesh_sizes
    mesh = SequenceMesh.create("cpu", ring_size=ring, ulysses_size=ulysses)
    cases = [Case(family, (1, ring, ulysses), length | settings, float32=True) for length in lengths]
    eager, model = (FAMILIES[family].model(cases[0]) for _ in range(2))
    compiler = CompileCounterWithBackend("aot_eager")
    for network in (eager, model):
        parallelize(network, mesh)
    compile_blocks(model, {"backend": compiler, "fullgraph": True})
    errors, graphs = [], []
    for case in cases:
        inputs = dict(FAMILIES[family].inputs(case, 0))
        expected, got = run(eager, inputs), run(model, inputs)
        errors += [float((x - y).norm() / y.norm()) for x, y in zip(got[0], expected[0], strict=True)]
        errors.append(gradient_error(got[1], expected[1]))
        graphs.append(compiler.frame_count)
    return errors, graphs


def check(
    ranks: Ranks, family: str, mesh_sizes: tuple[int, int], settings: dict[str, Any], lengths: list[dict[str, Any]]
) -> None:
    for errors, graphs in ranks(2).run(compiled, family, mesh_sizes, settings, lengths):
        assert all(error <= 1e-5 for error in errors)
        # One for the first length and one for all others, shared by all blocks of a class and a layout of inputs: of
        # HunyuanVideo's blocks of joint tokens, those behind the first are given slices of a joint tensor, with other
        # strides.
        each = 3 if family == "hunyuan_video" else 1
        assert graphs[0] == each
        if family == "hunyuan_video":  # masks are padded when they are sent, by no token, one or two
            assert graphs[-1] <= 4 * each
        else:
            assert {graphs[1], graphs[-1]} == {2 * each}


@pytest.mark.full  # in `make test`, those of one family over another transport: test_untraceable_transport.py
@pytest.mark.parametrize("family", ["cogvideox"])
def test_split_blocks_share_two_graphs_of_all_lengths(ranks: Ranks, family: str) -> None:
    check(ranks, family, (1, 2), SETTINGS[family][0], LENGTHS[:3])
    confirm(family, "compile")


@pytest.mark.full
@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("mesh_sizes", [(1, 2), pytest.param((2, 1), marks=needs_traced_ring)])
def test_split_blocks_share_two_graphs_of_all_lengths_in_all_families(
    ranks: Ranks, family: str, mesh_sizes: tuple[int, int]
) -> None:
    lengths = LENGTHS[:4] if family == "hunyuan_video" else LENGTHS  # it takes ten times as long to compile
    for settings in SETTINGS[family]:
        check(ranks, family, mesh_sizes, settings, lengths)
