"""Measures a kind of call on this rank's device: which kernels compute it rightly, and how fast."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import kernel_of_torch, torch_attention
from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionCase, AttentionKey, case_of
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.attention.op import attention_op, register
from lightning_videoscale.attention.records import SDPA, Record
from lightning_videoscale.attention.trial import Run, check, exact_enough, time_in_turns


class Measuring:
    """Measures kinds of calls, and checks each kernel once for each dtype, head dim and the like.

    Args:
        seconds: That a kind of call may take at most, beside what kernels need to compile.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._errors: dict[tuple[Any, ...], tuple[float, ...] | str] = {}

    def measure(self, key: AttentionKey, names: Iterable[str], device: torch.device) -> Record:
        """Returns what was measured of a kind of call.

        Args:
            key: The kind of call.
            names: The kernels to measure beside torch's own pick.
            device: Of this rank.
        """
        case = case_of(key, device)
        pick = kernel_of_torch(case)
        runs: dict[str, Run] = {SDPA: torch_attention if not case.with_lse else _run(pick, True)}
        reasons: dict[str, str] = {}
        for name in names:
            reason = KERNELS[name].objection(case)
            if reason is None and name == pick.name and (case.with_lse or not case.masked):
                reason = f"it is what {SDPA} runs"
            if reason is None:
                reason = self._inexact(KERNELS[name], case, runs[SDPA])
            if reason is None:
                runs[name] = _run(KERNELS[name], case.with_lse)
            else:
                reasons[name] = reason
        timings, slow = time_in_turns(runs, case, self._seconds)
        return Record(timings, reasons | slow)

    def _inexact(self, kernel: AttentionKernel, case: AttentionCase, of_torch: Run) -> str | None:
        """Why a kernel does not compute what it should, or None if it does."""
        torch_errors = self._errors_of(SDPA, of_torch, case)
        errors = self._errors_of(kernel.name, _run(kernel, case.with_lse), case)
        if isinstance(torch_errors, str) or isinstance(errors, str):
            return errors if isinstance(errors, str) else None
        if exact_enough(errors, torch_errors):
            return None
        listed = (" / ".join(f"{error:.2e}" for error in each) for each in (errors, torch_errors))
        return "errors of output, dq, dk, dv are {}, and those of torch's own pick {}".format(*listed)

    def _errors_of(self, name: str, run: Run, case: AttentionCase) -> tuple[float, ...] | str:
        kind = name, case.dtype, case.head_dim, case.masked, case.with_lse, case.deterministic
        if kind not in self._errors:
            try:
                self._errors[kind] = check(run, case)
            except Exception as error:  # of packages that may be of another version
                self._errors[kind] = f"{type(error).__name__}: {error}"
        return self._errors[kind]


def _run(kernel: AttentionKernel, with_lse: bool) -> Run:
    """Attention by one kernel, differentiable."""
    return partial(_attention_by, _Fixed(kernel), with_lse)


def _attention_by(
    chooser: _Fixed, with_lse: bool, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    out: Tensor = attention_op(query, key, value, mask, scale, with_lse, chooser.number)[0]
    return out


class _Fixed:
    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel, self.number = kernel, register(self)

    def kernel(self, case: AttentionCase) -> AttentionKernel:
        return self._kernel
