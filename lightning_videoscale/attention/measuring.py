"""Measures a kind of call on this rank's device: which kernels compute it rightly, and how fast."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from lightning_videoscale.attention.attend import kernel_of_torch, torch_attention
from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionCase, AttentionKey, case_of
from lightning_videoscale.attention.differentiable import attend_differentiably
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.attention.records import SDPA, AttentionRecord
from lightning_videoscale.attention.trial import AttentionFunction, check, exact_enough, start, time_in_turns


class Measuring:
    """Measures kinds of calls, and checks each kernel once for each dtype, head dim and the like.

    Args:
        seconds: That a kind of call may take at most, beside what kernels need to compile.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._errors: dict[tuple[Any, ...], tuple[float, ...] | str] = {}
        self._started: set[tuple[Any, ...]] = set()

    def measure(self, key: AttentionKey, names: Iterable[str], device: torch.device) -> AttentionRecord:
        """Returns what was measured of a kind of call.

        Args:
            key: The kind of call.
            names: The kernels to measure beside torch's own pick.
            device: Of this rank.
        """
        case = case_of(key, device)
        pick = kernel_of_torch(case)
        runs: dict[str, AttentionFunction] = {
            SDPA: partial(attend_differentiably, pick) if case.with_lse else torch_attention
        }
        reasons: dict[str, str] = {}
        for name in names:
            reason = KERNELS[name].objection(case)
            if reason is None and name == pick.name and (case.with_lse or not case.masked):
                reason = f"it is what {SDPA} runs"
            if reason is None:
                reason = self._inexact(KERNELS[name], case, runs[SDPA])
            if reason is None:
                runs[name] = partial(attend_differentiably, KERNELS[name])
            else:
                reasons[name] = reason
        for name, run in runs.items():
            self._start(name, run, case)
        timings, others, late = time_in_turns(runs, case, self._seconds)
        return AttentionRecord(timings, reasons | others, tuple(late))

    def _start(self, name: str, run: AttentionFunction, case: AttentionCase) -> None:
        """Has a kernel do what it does once in a process; what it raises, it will raise again when it is timed."""
        if (kind := _kind(name, case)) not in self._started:
            self._started.add(kind)
            with suppress(Exception):
                start(run, case)

    def _inexact(self, kernel: AttentionKernel, case: AttentionCase, of_torch: AttentionFunction) -> str | None:
        """Why a kernel does not compute what it should, or None if it does."""
        torch_errors = self._errors_of(SDPA, of_torch, case)
        errors = self._errors_of(kernel.name, partial(attend_differentiably, kernel), case)
        if isinstance(torch_errors, str) or isinstance(errors, str):
            return errors if isinstance(errors, str) else None
        if exact_enough(errors, torch_errors):
            return None
        listed = (" / ".join(f"{error:.2e}" for error in each) for each in (errors, torch_errors))
        return "errors of output, dq, dk, dv are {}, and those of torch's own pick {}".format(*listed)

    def _errors_of(self, name: str, run: AttentionFunction, case: AttentionCase) -> tuple[float, ...] | str:
        kind = _kind(name, case)
        if kind not in self._errors:
            try:
                self._errors[kind] = check(run, case)
            except Exception as error:  # of packages that may be of another version
                self._errors[kind] = f"{type(error).__name__}: {error}"
        return self._errors[kind]


def _kind(name: str, case: AttentionCase) -> tuple[Any, ...]:
    """By what a kernel is another one inside, at any length."""
    return name, case.dtype, case.head_dim, case.masked, case.with_lse, case.deterministic
