"""What is tried for each cell: `cell` says what a family's model does under a column, on two ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.families import test_parity, test_training
from tests.distributed.families.harness import Case, run
from tests.distributed.families.test_parity import FAMILIES, LENGTHS
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error
from tests.support.conditions import IMAGES, KEY_MASKS, TIMESTEPS, Condition, Refused
from tests.support.record import Cell

Ranks = Callable[[int], ProcessPool]
Trial = Callable[[Ranks, str], Cell]

ULYSSES, RING = (1, 1, 2), (1, 2, 1)
LENGTH = LENGTHS[0]


def cell(ranks: Ranks, family: str, column: str) -> Cell:
    """Tries it; an error is an outcome, unless it says of the machine that it is too slow."""
    try:
        found = _TRIALS[column](ranks, family)
    except AssertionError as error:
        if "did not finish within" in str(error):
            raise
        found = _cell("fails", reason=(str(error).strip().splitlines() or ["an assertion"])[-1])
    return replace(found, family=family, model=model_name(family), column=column)


def model_name(family: str) -> str:
    """Of its class."""
    return type(FAMILIES[family].model(Case(family))).__name__


def _cell(outcome: Any, **found: Any) -> Cell:
    """One whose place is filled in later."""
    return Cell("", "", "", outcome, **found)


# -- sizes, options ------------------------------------------------------------------------------------------------


def _all_variants(mesh: tuple[int, int, int], **options: bool) -> Trial:
    def trial(ranks: Ranks, family: str) -> Cell:
        cases = [Case(family, mesh, LENGTH | variant, **options) for variant in FAMILIES[family].variants]
        return _cell("exact", gradients=test_parity.check(ranks, cases))

    return trial


def _training(backend: str) -> Trial:
    def trial(ranks: Ranks, family: str) -> Cell:
        worst = test_training.check(ranks, backend, Case(family, ULYSSES, LENGTH | FAMILIES[family].variants[0]))
        return _cell("exact", gradients=worst, dtype="float32" if backend == "zero3" else "float64")

    return trial


def _fused(ranks: Ranks, family: str) -> Cell:
    said, reason = fused_parts(family)
    if not said:
        return _cell("lacks", reason=reason)
    return replace(_all_variants(ULYSSES, fused=True)(ranks, family), said=said, reason=reason)


def fused_parts(family: str) -> tuple[str, str]:
    """Classes that are replaced in any variant, and what is said of those that are not."""
    replaced, skipped = set(), set()
    for variant in FAMILIES[family].variants:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is skipped, which the report lists
            report = inject_fused_kernels(FAMILIES[family].model(Case(family, settings=LENGTH | variant)), "reference")
        replaced |= {each.class_name for each in report.replaced}
        skipped |= {f"{each.class_name}: {each.reason}" for each in report.skipped}
    return ", ".join(sorted(replaced)), "; ".join(sorted(skipped)) or ("" if replaced else "no block of a known kind")


def _compiled(ranks: Ranks, family: str) -> Cell:
    of_ranks = ranks(2).run(_compiled_errors, family)
    errors, breaks = [error for found, _ in of_ranks for error in found], of_ranks[0][1]
    assert all(error <= 1e-5 for error in errors), f"compiled gradients are off by {errors}"
    return _cell("exact", gradients=max(errors), dtype="float32", reason=breaks)


def _compiled_errors(family: str) -> tuple[list[float], str]:
    """How far compiled blocks are from eager ones, at two lengths, and why they are no whole graphs if they are not."""
    try:
        return _errors_of_compiled(family, fullgraph=True), ""
    except torch._dynamo.exc.Unsupported as error:
        return _errors_of_compiled(family, fullgraph=False), f"with graph breaks: {str(error).splitlines()[0]}"


def _errors_of_compiled(family: str, fullgraph: bool) -> list[float]:
    torch._dynamo.reset()
    errors = []
    lengths = (LENGTH | {"frames": 5}, LENGTH)  # tables of positions are as long as the first one needs
    cases = [Case(family, ULYSSES, length | FAMILIES[family].variants[0], float32=True) for length in lengths]
    eager, compiled = (FAMILIES[family].model(cases[0]) for _ in range(2))
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for network in (eager, compiled):
            parallelize(network, mesh)
        compiler = CompileCounterWithBackend("aot_eager")
        compile_blocks(compiled, {"backend": compiler, "fullgraph": fullgraph})
        for case in cases:
            gradients = [_gradients(network, FAMILIES[family].inputs(case, 0)) for network in (compiled, eager)]
            errors.append(gradient_error(*gradients))
    assert compiler.frame_count, "nothing was compiled"
    return errors


def _gradients(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(model, inputs)[1].backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


# -- conditions ----------------------------------------------------------------------------------------------------


def _condition(conditions: Mapping[str, Condition], lacks: Callable[[str], str]) -> Trial:
    """By Ulysses and by ring; of a family that is not named, ``lacks`` gives the reason, or raises."""

    def trial(ranks: Ranks, family: str) -> Cell:
        condition = conditions.get(family)
        if condition is None:
            return _cell("lacks", reason=lacks(family))
        if isinstance(condition, Refused):
            said = ranks(2).run(_refusal, family, condition.arguments)
            assert len(set(said)) == 1, said
            return _cell("refused", reason=said[0])
        cases = [Case(family, mesh, LENGTH | condition.settings) for mesh in (ULYSSES, RING)]
        return _cell("exact", gradients=test_parity.check(ranks, cases), reason=condition.remark)

    return trial


def _refusal(family: str, arguments: Mapping[str, Any]) -> str:
    case = Case(family, ULYSSES, float32=True)
    model, inputs = FAMILIES[family].model(case), FAMILIES[family].inputs(case, 0)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        parallelize(model, mesh)
        try:
            model(**inputs | arguments)
        except ValueError as error:
            return str(error)
    raise AssertionError(f"{[*arguments]} were taken, which are meant to be refused")


def without_argument(*parts: str) -> Callable[[str], str]:
    """Makes sure that no argument of a model's forward has such a name."""

    def lacks(family: str) -> str:
        arguments = inspect.signature(type(FAMILIES[family].model(Case(family))).forward).parameters
        named = [name for name in arguments if any(part in name for part in parts)]
        assert not named, f"it takes {named}: tests/support/conditions.py must say with which settings"
        return "its forward takes no such argument"

    return lacks


def one_timestep(family: str) -> str:
    """Makes sure that a whole model takes no timestep for each token or frame."""
    case = Case(family, settings=LENGTH, float32=True)
    model, inputs = FAMILIES[family].model(case), dict(FAMILIES[family].inputs(case, 0))
    name = next(name for name in ("timestep", "t", "time") if name in inputs)
    for count in (LENGTH["frames"], LENGTH["frames"] * LENGTH["side"] ** 2):
        try:
            model(**inputs | {name: torch.rand(inputs[name].shape[0], count)})
        except (AssertionError, RuntimeError, ValueError):
            continue
        raise AssertionError(f"it takes {count} timesteps: tests/support/conditions.py must say with which settings")
    return "it takes one timestep for each sample"


_TRIALS: Mapping[str, Trial] = {
    "Ulysses": _all_variants(ULYSSES),
    "ring": _all_variants(RING),
    "key mask": _condition(KEY_MASKS, without_argument("mask")),
    "per-token timesteps": _condition(TIMESTEPS, one_timestep),
    "image conditions": _condition(
        IMAGES, without_argument("image_embed", "image_latent", "states_image", "control", "inpaint", "history", "pose")
    ),
    "checkpointing": _all_variants(ULYSSES, checkpointing=True),
    "compile": _compiled,
    "FSDP2": _training("fsdp2"),
    "ZeRO-3": _training("zero3"),
    "LoRA": _all_variants(ULYSSES, adapters=True),
    "fused parts": _fused,
}
