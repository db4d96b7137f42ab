"""Whether a kernel computes attention, and how long it takes: measured beside torch's own pick, on one device.

`check`           errors of kernels against float64, at lengths that no tile divides
`start`           what a library does once in a process, so that no timing contains it
`time_in_turns`   seconds of forward and backward
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.attention.case import AttentionCase

AttentionFunction = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""Attention of (B, H, S, D) tensors with a scale and a mask (B, K), differentiable."""

LARGEST_ERROR = 1.05
"""Times the error of torch's own pick."""

_MOST_FLOPS = 1e13  # of a timed pass, forward and backward: some 30 ms of torch's slower kernels on an H200
_ROUNDS = 5
_SHORTEST_TURN = 5e-3  # seconds
_HOPELESS = 1.5  # times the fastest, after one pass
_REPEATS_OF_CHECK = 3  # a race shows in some launches only
_GARBAGE = 0.1  # relative difference of results in half precision


class Timing(NamedTuple):
    """Seconds of a kernel, forward and backward.

    Attributes:
        steady: Of a pass.
        first: By which the first pass of a new shape takes longer, as cuDNN builds a plan then.
    """

    steady: float
    first: float


class Problem(NamedTuple):
    """Tensors of one call, and the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None
    cotangent: Tensor

    @classmethod
    def random(cls, case: AttentionCase, batch: int) -> Problem:
        """Draws one; tensors lie in memory with tokens first, as networks project them."""
        generator = torch.Generator(case.device).manual_seed(case.queries)
        heads = case.rows // batch

        def draw(tokens: int) -> Tensor:
            shape = batch, tokens, heads, case.head_dim
            x = torch.randn(shape, device=case.device, dtype=torch.float32, generator=generator)
            return x.to(case.dtype).transpose(1, 2)

        query, key, value, cotangent = draw(case.queries), draw(case.keys), draw(case.keys), draw(case.queries)
        mask = None
        if case.masked:
            mask = torch.rand(batch, case.keys, device=case.device, generator=generator) < 0.8
            mask[:, 0] = True
        return cls(query, key, value, case.head_dim**-0.5, mask, cotangent)

    def solve(self, run: AttentionFunction) -> tuple[Tensor, ...]:
        """Returns the output and the gradients of query, key and value."""
        inputs = [x.detach().requires_grad_() for x in (self.query, self.key, self.value)]
        with torch.enable_grad():
            out = run(inputs[0], inputs[1], inputs[2], self.scale, self.mask)
            return out.detach(), *torch.autograd.grad(out, inputs, self.cotangent)

    def exact(self) -> tuple[Tensor, ...]:
        """As `solve`, as the formula says, in float64."""
        wide = self._replace(
            query=self.query.double(),
            key=self.key.double(),
            value=self.value.double(),
            cotangent=self.cotangent.double(),
        )
        return wide.solve(_formula)


def _formula(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    logits = query @ key.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    return logits.softmax(-1) @ value


def check(run: AttentionFunction, case: AttentionCase) -> tuple[float, ...]:
    """Returns the relative errors of output and gradients, the largest of several runs, at lengths of its own."""
    problem = Problem.random(replace(case, rows=6, queries=333, keys=517), batch=2)
    exact = problem.exact()
    worst = [0.0] * len(exact)
    for _ in range(_REPEATS_OF_CHECK):
        for index, (got, expected) in enumerate(zip(problem.solve(run), exact, strict=True)):
            error = float((got.double() - expected).norm() / expected.norm())
            worst[index] = max(worst[index], error) if error == error else float("inf")
    return tuple(worst)


def exact_enough(errors: tuple[float, ...], of_torch: tuple[float, ...]) -> bool:
    """Whether no error is above that of torch's own pick by more than `LARGEST_ERROR`."""
    return all(mine <= LARGEST_ERROR * theirs for mine, theirs in zip(errors, of_torch, strict=True))


def start(run: AttentionFunction, case: AttentionCase) -> None:
    """Runs a kernel at lengths beside those of a call, one that tiles divide and one that they do not.

    cuDNN loads libraries and compiles for seconds the first time, and a part of it only for lengths of one of these
    kinds. What is left for the first pass of a call's own lengths is what every new shape costs.
    """
    timed = shortened(case)
    for odd in (0, 8):
        queries, keys = (-(-tokens // 128 + 1) * 128 + odd for tokens in (timed.queries, timed.keys))
        Problem.random(replace(timed, queries=queries, keys=keys), batch=1).solve(run)
    wait_for(case.device)


def time_in_turns(
    runs: Mapping[str, AttentionFunction], case: AttentionCase, seconds: float
) -> tuple[dict[str, Timing], dict[str, str], list[str]]:
    """Times kernels on one problem, at lengths at which a pass is short.

    Args:
        runs: What is timed, by name; the first is torch's own pick.
        case: The call.
        seconds: In which it is to end; what has not had its first pass by then is left out.

    Returns:
        The times, of those without one the reason, and which of them are late: their turn did not come.
    """
    begin = time.perf_counter()
    problem = Problem.random(shortened(case), batch=1)
    reasons: dict[str, str] = {}
    late: list[str] = []
    firsts: dict[str, float] = {}
    seconds_of: dict[str, float] = {}
    expected: tuple[Tensor, ...] | None = None
    for name, run in runs.items():
        if expected is not None and time.perf_counter() - begin > 0.6 * seconds:
            reasons[name] = f"not measured yet, since {seconds:.0f} s were spent before its turn"
            late.append(name)
            continue
        try:
            firsts[name], results = _timed(problem, run, 1, case.device)
            seconds_of[name], _ = _timed(problem, run, 1, case.device)
        except Exception as error:  # of packages that may be of another version, or out of memory
            if expected is None:
                raise
            reasons[name] = f"{type(error).__name__}: {error}"
            continue
        expected = results if expected is None else expected
        if reason := _unlike(results, expected, case.dtype):
            reasons[name] = reason
        elif seconds_of[name] > _HOPELESS * min(seconds_of.values()):
            reasons[name] = f"{seconds_of[name] * 1e3:.1f} ms, {seconds_of[name] / min(seconds_of.values()):.1f} x"
        del results
    expected = None
    first, *others = runs
    racing = [first, *(name for name in others if name in seconds_of and name not in reasons)]
    passes = {name: max(1, min(16, int(_SHORTEST_TURN / max(seconds_of[name], 1e-6)))) for name in racing}
    turns: dict[str, list[float]] = {name: [] for name in racing}
    for number in range(_ROUNDS):
        start = number % len(racing)
        for name in racing[start:] + racing[:start]:
            turns[name].append(_timed(problem, runs[name], passes[name], case.device)[0])
        if time.perf_counter() - begin > seconds:
            break
    steady = {name: statistics.median(mine) for name, mine in turns.items()}
    timings = {name: Timing(steady[name], max(0.0, firsts[name] - seconds_of[name])) for name in racing}
    return timings, reasons, late


def shortened(case: AttentionCase) -> AttentionCase:
    """Returns the call at lengths at which a pass takes tens of milliseconds, both shorter by the same factor."""
    flops = 14 * case.queries * case.keys * case.rows * case.head_dim  # four in forward, ten in backward
    most = _MOST_FLOPS if case.device.type == "cuda" else 1e9
    factor = min(1.0, (most / flops) ** 0.5)
    return replace(case, queries=max(1, int(case.queries * factor)), keys=max(1, int(case.keys * factor)))


def _timed(
    problem: Problem, run: AttentionFunction, passes: int, device: torch.device
) -> tuple[float, tuple[Tensor, ...]]:
    """Seconds of a pass, and its results."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(passes):
        results = problem.solve(run)
    wait_for(device)
    return (time.perf_counter() - begin) / passes, results


def wait_for(device: torch.device) -> None:
    """Returns when a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _unlike(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> str | None:
    largest = _GARBAGE if dtype in (torch.bfloat16, torch.float16) else 1e-3
    for what, got, other in zip(("output", "dq", "dk", "dv"), results, expected, strict=True):
        difference = float((got.float() - other.float()).norm() / other.float().norm())
        if not difference <= largest:
            return f"its {what} differs from that of torch's own kernel by {difference:.2g}"
    return None
