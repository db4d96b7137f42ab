"""One device and four ranks give the same loss, the same gradients and the same trained parameters.

The clips of one device are those of all data-parallel ranks together. `make test` runs cases in which every pair of
settings occurs under DDP and FSDP2, and one of each other backend; `make test-full` all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.parity import CLIP, Case, Errors, Outcome, compare, train_alone
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.models import gradient_error
from tests.pairwise import pairwise_cases

Ranks = Callable[[int], ProcessPool]
Check = Callable[[Sequence[Case]], None]
Mesh = tuple[int, int, int]

BACKENDS = ["ddp", "fsdp2", "fsdp2_replicas", "zero1", "zero2", "zero3", "zero3_late"]
TABLE: dict[str, Sequence[Any]] = {
    "backend": BACKENDS,
    "mesh": [(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 2, 2), (1, 4, 1)],
    "tokens": ["even", "odd"],
    "heads": [4, 5],
    "masks": [False, True],
    "clipping": [None, "norm"],
    "accumulation": [1, 2],
    "checkpointing": [None, "strategy", "model"],
    "batch_size": [1, 3],
    "variant": ["t2v", "ti2v", "i2v"],
    "verified": [False, True],
}
PAIRWISE = [Case(**settings) for settings in pairwise_cases(TABLE)]
# (4, 1, 1) splits nothing, and (2, 2, 1) is among the others.
SOME = {"backend": ["ddp", "fsdp2"], "mesh": [(2, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 1)]}
OF_MAIN = [Case(**settings) for settings in pairwise_cases(TABLE | SOME)]
# The mesh, the masks and the model are what they are under DDP; the shards, clipping and accumulation are not. Under
# ZeRO-3, the comparison with the whole network takes as long as the training: test_verify_plan_in_training.py has it.
OF_OTHERS = [
    Case("fsdp2_replicas", (2, 1, 2), "odd", masks=True, clipping="norm", accumulation=2, checkpointing="strategy"),
    Case("zero1", (2, 1, 2), "odd", masks=True, clipping="norm", accumulation=2, checkpointing="model", variant="i2v"),
    Case("zero2", (1, 2, 2), heads=5, clipping="norm", accumulation=2, checkpointing="strategy", batch_size=3),
    Case(
        "zero3",
        (2, 2, 1),
        "odd",
        heads=5,
        masks=True,
        clipping="norm",
        accumulation=2,
        checkpointing="strategy",
        verified=False,
    ),
    Case(
        "zero3_late",
        (2, 1, 2),
        "odd",
        masks=True,
        clipping="norm",
        checkpointing="model",
        variant="i2v",
        verified=False,
    ),
]
# All combinations, each with one of the variants in turn, such that no other factor is tied to it: 5760 cases.
FULL_BACKENDS = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
CROSSED = TABLE | {"backend": FULL_BACKENDS}
FULL_TABLE = {name: values for name, values in CROSSED.items() if name not in ("variant", "verified")}
FULL = [
    Case(**dict(zip(FULL_TABLE, values, strict=True)), variant=TABLE["variant"][(i + i // 6) % 3])
    for i, values in enumerate(itertools.product(*FULL_TABLE.values()))
]
AT_ONCE = 12
"""Cases of one call of a pool."""

each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_deepspeed if name.startswith("zero") else []) for name in BACKENDS]
)


@pytest.fixture(scope="module")
def check(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Compares cases with one device, whose results are computed once."""
    folder = tmp_path_factory.mktemp("one_device")

    def check_all(cases: Sequence[Case]) -> None:
        for start in range(0, len(cases), AT_ONCE):
            some = list(cases[start : start + AT_ONCE])
            alone = {case.alone: case for case in some if not case.file(folder).exists()}
            ranks(1).run(train_alone, list(alone.values()), folder)
            for case, *errors in zip(some, *ranks(4).run(compare, some, folder), strict=True):
                check_one(case, errors, Outcome(*torch.load(case.file(folder), map_location="cpu")))

    return check_all


def check_one(case: Case, errors: list[Errors], expected: Outcome) -> None:
    tolerance = 1e-5 if case.float32 else 1e-6 if case.is_zero else 1e-10
    losses = torch.tensor([error.losses for error in errors], dtype=torch.float64)
    sp = len(errors) // case.mesh[0]
    assert torch.equal(losses, losses[::sp].repeat_interleave(sp, 0)), f"{case}: neighbours share clips, not losses"
    assert losses.mean(0).tolist() == pytest.approx(expected.losses, rel=tolerance), case
    if case.clipping == "norm":
        assert all(
            torch.stack([g.norm() for g in step.values()]).norm() > 5 * CLIP["norm"] for step in expected.gradients
        )
    assert max(error.gradients for error in errors) <= tolerance, case
    assert max(error.parameters for error in errors) <= tolerance, case


@each_backend
def test_pairs_of_settings(check: Check, backend: str) -> None:
    check([case for case in OF_MAIN + OF_OTHERS if case.backend == backend])


@pytest.mark.full
@each_backend
def test_every_pair_of_settings(check: Check, backend: str) -> None:
    check([case for case in PAIRWISE if case.backend == backend])


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("checkpointing", TABLE["checkpointing"], ids=str)
@pytest.mark.parametrize("mesh", TABLE["mesh"], ids=str)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_deepspeed if name.startswith("zero") else []) for name in FULL_BACKENDS]
)
def test_all_combinations(check: Check, backend: str, mesh: Mesh, checkpointing: str | None) -> None:
    here = backend, mesh, checkpointing
    check([case for case in FULL if (case.backend, case.mesh, case.checkpointing) == here])


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", (1, 2, 2), own_noise=True, accumulation=2, checkpointing="strategy"),
        Case("fsdp2", (1, 1, 4), own_noise=True, batch_size=3, attention="math"),
        Case("ddp", (2, 2, 1), clipping="value"),
    ],
    ids=["own_noise_ddp", "own_noise_fsdp2", "clipping_by_value"],
)
def test_what_not_every_case_can_have(check: Check, case: Case) -> None:
    check([case])


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", (1, 1, 4), "odd", float32=True),
        pytest.param(Case("fsdp2", (1, 2, 2), "odd", float32=True), marks=pytest.mark.full),
        pytest.param(Case("zero3", (2, 1, 2), "odd", float32=True), marks=[needs_deepspeed, pytest.mark.full]),
    ],
    ids=["ddp", "fsdp2", "zero3"],
)
def test_float32_as_the_model_stands(check: Check, case: Case) -> None:
    check([case])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case("ddp", (2, 1, 2), "odd", heads=5, masks=True, accumulation=2, checkpointing="strategy", variant="i2v"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            Case(
                "fsdp2", (1, 1, 4), "odd", heads=5, clipping="norm", checkpointing="model", batch_size=3, variant="ti2v"
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            Case("fsdp2_replicas", (1, 2, 2), "odd", accumulation=2, checkpointing="strategy", batch_size=3),
            marks=pytest.mark.full,
        ),
        pytest.param(
            Case("zero3", (2, 1, 2), heads=5, accumulation=2, float32=True, verified=False), marks=needs_deepspeed
        ),
        Case("ddp", (1, 1, 4), "odd", own_noise=True, float32=True),
    ],
    ids=["ddp", "fsdp2", "ring", "zero3", "float32"],
)
def test_messages_that_are_slices_of_projections(check: Check, case: Case) -> None:
    check([replace(case, schedule="sliced")])


@pytest.mark.parametrize("factor", [2.0, 1.001])
def test_the_comparison_notices_a_wrong_factor(factor: float) -> None:
    reference = {"a": torch.ones(3, dtype=torch.float64), "b": torch.full((2,), 1e-9, dtype=torch.float64)}
    assert gradient_error(reference | {"a": reference["a"] * factor}, reference) > 1e-4
