"""Every case from its seed: which of 400 variants, which sizes; and what became of it.

A variant is what makes kernels compile; sizes, layouts, values and most of what needs a gradient are the case's own.
Every 20 000 seeds have 400 variants of their own, of which fewer than 300 compile anything: the reference does not, nor
does what is refused.
"""

from __future__ import annotations

import functools
import itertools
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tests.gpu.fuzzing.heads import HEAD_OPS, HeadCase, HeadVariant
from tests.gpu.fuzzing.judge import excess, misfit, run
from tests.gpu.fuzzing.linears import LinearCase, LinearVariant
from tests.gpu.fuzzing.rows import RowCase, RowVariant
from tests.gpu.fuzzing.tensors import Tensors

Variant = RowVariant | HeadVariant | LinearVariant
Case = RowCase | HeadCase | LinearCase
Status = Literal["right", "refused", "wrong"]

SEEDS_OF_A_POOL = 20_000
_SHARES = {
    "norm_modulate": 70,
    "fork_norm_modulate": 35,
    "gate_residual": 70,
    "gate_residual_norm_modulate": 90,
    "qk_norm_rope": 80,
    "norm_rope_over_ranks": 20,
    "gelu": 16,
    "gelu_linear": 10,
    "qkv_linear": 9,
}
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_ALL = (*_NARROW, torch.float64)
_REFUSALS = (TypeError, ValueError, NotImplementedError)


def _pairs(dtypes: tuple[torch.dtype, ...]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(first, second) for first in dtypes for second in dtypes]


# "auto" and the reference take everything, the others refuse float64 by name.
_COMBINATIONS: list[tuple[str, tuple[torch.dtype, torch.dtype]]] = (
    [(backend, pair) for backend in ("cuda", "triton") for pair in _pairs(_NARROW)] * 2
    + [(backend, pair) for backend in ("auto", "reference") for pair in _pairs(_ALL)]
    + [(backend, (torch.float64, torch.float64)) for backend in ("cuda", "triton")]
)


@dataclass(frozen=True)
class Options:
    """What cases depend on beside their seed.

    Attributes:
        device: "cuda" or "cpu".
        backend: Takes the place of the backend that is drawn; None leaves it.
        elements: The most that an activation may have.
        interpreted: Whether Triton's interpreter runs its kernels, which cuts bfloat16 off instead of rounding it.
    """

    device: str
    backend: str | None = None
    elements: int = 2_000_000
    interpreted: bool = False


class Verdict(NamedTuple):
    """What became of a case.

    Attributes:
        seed: Of it.
        op: Its name.
        backend: That was asked for.
        status: "refused" with a reason that the documentation allows, else right or wrong.
        message: Why it was refused, or what is wrong.
        errors: Every result by name, with its largest error over what is allowed.
        fatal: Whether the device is in a state in which no other case can be judged.
    """

    seed: int
    op: str
    backend: str
    status: Status
    message: str = ""
    errors: tuple[tuple[str, float], ...] = ()  # of a type that processes can send each other
    fatal: bool = False


@functools.cache
def variants(pool: int, options: Options) -> list[Variant]:
    """The 400 variants of a pool: of every op every backend and pair of dtypes in turn, all else at random."""
    drawn: list[Variant] = []
    for op, share in _SHARES.items():
        rng = random.Random(f"{pool} {op}")
        combinations = rng.sample(_COMBINATIONS, len(_COMBINATIONS))
        for backend, pair in itertools.islice(itertools.cycle(combinations), share):
            drawn.append(_kind(op).draw(rng, op, options.backend or backend, pair, options.elements))
    return drawn


def _kind(op: str) -> type[RowVariant] | type[HeadVariant] | type[LinearVariant]:
    if op in ("gelu", "gelu_linear", "qkv_linear"):
        return LinearVariant
    return HeadVariant if op in HEAD_OPS else RowVariant


def variant_number(seed: int) -> int:
    """Which of its pool's variants a case has."""
    return random.Random(seed).randrange(sum(_SHARES.values()))


def case_of(seed: int, options: Options) -> Case:
    """The case of a seed."""
    variant = variants(seed // SEEDS_OF_A_POOL, options)[variant_number(seed)]
    rng = random.Random(f"case {seed}")
    if isinstance(variant, RowVariant):
        return RowCase.draw(rng, seed, variant, options.elements)
    if isinstance(variant, HeadVariant):
        return HeadCase.draw(rng, seed, variant, options.elements)
    return LinearCase.draw(rng, seed, variant, options.elements)


def judge(seed: int, options: Options) -> Verdict:
    """Runs a case and compares every result with the oracle's; one synchronisation of the device."""
    case = case_of(seed, options)
    verdict = Verdict(seed, case.variant.op, case.variant.backend, "right")
    try:
        return _judge(case, verdict, options)
    except Exception as error:  # whatever an op raises is a verdict on it
        fatal = isinstance(error, RuntimeError) and "CUDA" in str(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return verdict._replace(status="wrong", message=message, fatal=fatal)


def _judge(case: Case, verdict: Verdict, options: Options) -> Verdict:
    rng = random.Random(f"checks {case.seed}")
    twice, filled = rng.random() < 0.25, rng.random() < 0.5
    draw = Tensors(case.seed, options.device)
    arguments, cotangents = case.arguments(draw), case.cotangents(draw)
    if twice:
        draw.remember()
    try:
        with _filled_memory(filled):
            outcome = run(case.call, arguments, case.used, cotangents)
    except _REFUSALS as error:
        # "auto" and the reference take whatever the documentation allows.
        meant = not case.valid or case.variant.backend in ("cuda", "triton")
        return verdict._replace(status="refused" if meant else "wrong", message=str(error))
    if not case.valid:
        return verdict._replace(status="wrong", message="runs, though the documentation does not allow these dtypes")
    expected = case.expected(arguments, outcome)
    if wrong := [message for message in map(misfit, expected) if message is not None]:
        return verdict._replace(status="wrong", message="; ".join(wrong))
    names = [row.name for row in expected]
    figures = [excess(row, options.interpreted) for row in expected]
    if twice:
        again = run(case.call, arguments, case.used, cotangents)
        names += ["the second run", "what was written into arguments or around them"]
        pairs = zip(
            (*outcome.outputs, *outcome.gradients.values()), (*again.outputs, *again.gradients.values()), strict=True
        )
        differ = [_differ(a, b) for a, b in pairs if a is not None and b is not None]
        figures += [2.0 * torch.stack(differ).any().double(), 2.0 * draw.changed().double()]
    errors = tuple(zip(names, torch.stack(figures).tolist(), strict=True))
    message = ", ".join(f"{name} is off by {error:.3g} times what is allowed" for name, error in errors if error > 1)
    return verdict._replace(status="wrong" if message else "right", message=message, errors=errors)


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two tensors have other bits, NaN being like NaN."""
    return ((a != b) & ~(a.isnan() & b.isnan())).any()


@contextmanager
def _filled_memory(filled: bool) -> Iterator[None]:
    """Fills memory that PyTorch hands out with NaN, so that what a kernel does not write shows."""
    if filled:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
