"""Blocks that are compiled exchange by every schedule: one graph each, exact, the same messages on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.blocks import checkpoint_activations
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Record, RectifiedFlow
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, trainer

Ranks = Callable[[int], ProcessPool]

LENGTHS: list[dict[str, Any]] = [{"frames": 2 + n, "text": 5 + 3 * n % 7, "side": 3, "batch": 2} for n in range(10)]
"""Of more buckets than Dynamo compiles anew for; over two ranks video and text are even or not."""


class Compiled(NamedTuple):
    """A compiled network.

    Attributes:
        family: Of the model.
        schedule: By which it exchanges.
        checkpointing: Whether activation checkpointing is around the blocks.
        hooked: Whether a rank has hooks on projections, whose results are then sent.
        autocast: Whether it computes in bfloat16, from float32.
        backend: Of `torch.compile`.
        lengths: How many of `LENGTHS`.
        ranks: Over how many; in rings of two.
    """

    family: str
    schedule: ScheduleName
    checkpointing: bool = False
    hooked: bool = False
    autocast: bool = False
    backend: str = "aot_eager"
    lengths: int = 3
    ranks: int = 2


def results(model: nn.Module, inputs: dict[str, Any], casts: AbstractContextManager[Any]) -> dict[str, Tensor]:
    model.zero_grad()
    with casts:
        outputs, loss = run(model, inputs)
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values())
    return {f"output {n}": x for n, x in enumerate(outputs)} | gradients


def differences(case: Compiled) -> tuple[list[float], list[int]]:
    """How far the compiled model is from an eager and serial one at each length, and how many graphs there are then."""
    compiler = CompileCounterWithBackend(case.backend)
    cases = [Case(case.family, settings=lengths, float32=case.autocast) for lengths in LENGTHS[: case.lengths]]
    serial, model = (FAMILIES[case.family].model(cases[0]) for _ in range(2))
    errors, graphs = [], []
    # A mode of torch, inside of which joint attention runs, does not let Dynamo trace what lifts casts.
    lifts = case.family == "wan" and not case.autocast
    with SequenceMesh.create("cpu", ulysses_size=2, ring_size=case.ranks // 2) as mesh:
        parallelize(serial, mesh, verify_plan=False)
        parallelize(model, mesh, verify_plan=False, schedule=case.schedule)
        if case.hooked and dist.get_rank() == 1:
            for path, module in model.named_modules():
                if path.endswith(("to_k", "to_out.0", "add_v_proj")):
                    module.register_forward_hook(lambda *_: None)
        compile_blocks(model, {"backend": compiler, "fullgraph": True})
        if case.checkpointing:
            checkpoint_activations(model)
        for each in cases:
            found = []
            for network in (serial, model):
                casts = torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()
                with lifted_casts() if lifts else nullcontext():
                    found.append(results(network, dict(FAMILIES[case.family].inputs(each, 0)), casts))
            errors.append(gradient_error(found[1], found[0]))
            graphs.append(compiler.frame_count)
    return errors, graphs


@pytest.mark.parametrize(
    "case",
    [
        Compiled("wan", "sliced"),
        pytest.param(Compiled("wan", "overlap", checkpointing=True, lengths=1), marks=pytest.mark.full),
        pytest.param(Compiled("wan", "sliced", lengths=10), marks=pytest.mark.full),
        pytest.param(Compiled("cogvideox", "sliced", checkpointing=True, lengths=1), marks=pytest.mark.full),
        pytest.param(Compiled("cogvideox", "sliced", lengths=2), marks=pytest.mark.full),
        pytest.param(Compiled("cogvideox", "overlap", lengths=2), marks=pytest.mark.full),
        pytest.param(Compiled("wan", "overlap", checkpointing=True, lengths=2), marks=pytest.mark.full),
        pytest.param(Compiled("wan", "sliced", checkpointing=True, ranks=4), marks=pytest.mark.full),
        pytest.param(Compiled("wan", "sliced", checkpointing=True, backend="inductor"), marks=pytest.mark.full),
        pytest.param(Compiled("cogvideox", "sliced", backend="inductor"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_one_graph_of_the_first_length_and_one_of_all_others_equal_serial_blocks(ranks: Ranks, case: Compiled) -> None:
    for errors, graphs in ranks(case.ranks).run(differences, case):
        assert max(errors) < 1e-12
        assert graphs == [1] + [2] * (case.lengths - 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Compiled("flux", "sliced", checkpointing=True, lengths=1),
        Compiled("flux", "overlap"),
        Compiled("mochi", "sliced"),
    ],
    ids=str,
)
def test_text_with_weights_of_its_own(ranks: Ranks, case: Compiled) -> None:
    for errors, _ in ranks(2).run(differences, case):
        assert max(errors) < (1e-6 if case.family == "mochi" else 1e-12)  # which casts to float32 inside


@pytest.mark.full  # of eager blocks, in test_schedules.py
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_ranks_may_differ_in_their_projections(ranks: Ranks, family: str) -> None:
    for errors, _ in ranks(2).run(differences, Compiled(family, "sliced", hooked=True, lengths=1)):
        assert max(errors) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_under_autocast(ranks: Ranks, family: str) -> None:
    for errors, _ in ranks(2).run(differences, Compiled(family, "sliced", autocast=True, lengths=1)):
        assert max(errors) < 2e-2


# -- by a strategy -------------------------------------------------------------------------------------------------


def fit(schedule: ScheduleName, **options: Any) -> tuple[list[float], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    record, module = Record(), RectifiedFlow()
    strategy = SequenceParallelDDPStrategy(schedule=schedule, activation_checkpointing=True, **options)
    with lifted_casts():
        trainer(strategy, callbacks=[record], precision="64-true").fit(module, clips(torch.float64))
    assert strategy.describe()["schedule"] == schedule
    return record.losses, record.gradients


def test_a_compiled_model_trains_by_slices_as_an_eager_one_does_serially(ranks: Ranks) -> None:
    losses, gradients = ranks(2).run(fit, "serial")[0]
    found, compiled = ranks(2).run(fit, "sliced", compile={"backend": "aot_eager", "fullgraph": True})[0]
    assert found == pytest.approx(losses, rel=1e-12)
    for mine, serial in zip(compiled, gradients, strict=True):
        assert gradient_error(mine, serial) < 1e-12


def beyond_the_limit() -> str:
    first, *others = (Case("wan", settings=lengths) for lengths in LENGTHS)
    model = FAMILIES["wan"].model(first)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        parallelize(model, mesh, verify_plan=False, schedule="sliced")
        compile_blocks(model, {"backend": "eager", "dynamic": False}, stays_compiled=True)
        with torch._dynamo.config.patch(recompile_limit=2):
            try:
                for each in (first, *others):
                    run(model, FAMILIES["wan"].inputs(each, 0))
            except RuntimeError as error:
                return str(error)
    return "no error"


def test_blocks_that_would_not_be_compiled_say_so(ranks: Ranks) -> None:
    for message in ranks(2).run(beyond_the_limit):
        assert "2 times" in message and "'dynamic': False" in message and "recompile_limit" in message
