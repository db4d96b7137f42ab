"""Which kernel computes attention: `AttentionChoices`, the one place that all attention of a run asks.

A call asks for its kernel (`kernel`, `choose`) and is answered from what is known: measured before, in this run or an
earlier one, or else the nearest that was measured, or else torch's own pick. It never waits. What was asked for and is
not known is measured by `settle`, which all ranks call together between two steps. So no rank changes a kernel within
a step, and all ranks choose alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_videoscale.attention.attend import kernel_of_torch
from lightning_videoscale.attention.backends import KERNELS
from lightning_videoscale.attention.case import AttentionCase, AttentionKey, device_name
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.attention.measuring import Measuring
from lightning_videoscale.attention.names import AttentionBackend
from lightning_videoscale.attention.op import register
from lightning_videoscale.attention.records import SDPA, AttentionRecord, RecordFile, slowest_of_ranks
from lightning_videoscale.compat.torch.attention import sdpa_choice
from lightning_videoscale.ranks import gather_over_ranks, of_first_rank, rank_in_world

_SECONDS_OF_KEY = 2.0
_SECONDS_OF_RUN = 20.0
_SHORTEST = 1024  # tokens: of fewer queries or keys, attention is a small part of a step
_LAYERS = 30  # as video transformers have about: a micro-batch calls attention of a shape so often
MICRO_BATCHES_PER_SHAPE = 33.0
"""Are expected where nobody says how many are to come."""

_log = logging.getLogger(__name__)


class AttentionChoices:
    """Chooses the kernel of every call of attention in a run.

    Args:
        backend: ``"auto"`` chooses the fastest; a kernel by name runs, or raises with the reason; ``"sdpa"`` leaves it
            to torch.
        candidates: What ``"auto"`` chooses from beside torch's own pick; all fused kernels on a GPU, and none on a CPU,
            if left out.
        folder: Where measurements are kept; by default the package's cache folder.
        log: Is told, on rank 0, what was chosen.

    Attributes:
        backend: As it was asked for.
        shortest: Tokens of queries and of keys from which ``"auto"`` chooses; shorter attention is torch's own pick.
        number: Under which the ops find it.
        version: Another one whenever calls may get another kernel than before.

    Raises:
        ValueError: If there is no backend of that name.
    """

    def __init__(
        self,
        backend: AttentionBackend = "auto",
        *,
        candidates: Sequence[str] | None = None,
        folder: Path | None = None,
        log: Callable[[str], None] = _log.info,
    ) -> None:
        unknown = {backend, *(candidates or ())} - {*get_args(AttentionBackend)}
        if unknown:
            raise ValueError(f"attention_backend={backend!r} is not one of {get_args(AttentionBackend)}.")
        self.backend: AttentionBackend = backend
        self.number = register(self)
        self.shortest = _SHORTEST
        self.version = 0
        self.log = log
        self._candidates, self._folder = candidates, folder
        self._records: dict[AttentionKey, AttentionRecord] = {}
        self._wanted: set[AttentionKey] = set()
        self._calls_per_shape = _LAYERS * MICRO_BATCHES_PER_SHAPE
        self._names_of_calls: dict[tuple[Any, ...], str] = {}
        self._kernels_of_calls: dict[tuple[Any, ...], str] = {}
        self._measuring = Measuring(_SECONDS_OF_KEY)
        self._seconds_left = _SECONDS_OF_RUN
        self._device: torch.device | None = None
        self._before: Mapping[str, str] = {}

    # -- asking --------------------------------------------------------------------------------------------------

    def leaves_it_to_torch(self, device: torch.device) -> bool:
        """Whether no call on a device can get another kernel than torch's own pick."""
        return self.backend == SDPA or (self.backend == "auto" and not self._names(device))

    @property
    def leaves_all_to_torch(self) -> bool:
        """Whether no call can get another kernel than torch's own pick, as far as the device is known."""
        return self.backend == SDPA or (self._device is not None and self.leaves_it_to_torch(self._device))

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called, so that `settle` can be."""
        return self._device is not None

    def choose(self, case: AttentionCase) -> str:
        """Returns the name of the kernel that runs a call, "sdpa" for torch's own pick.

        A kernel that `torch.nn.attention.sdpa_kernel` asks for comes first.

        Raises:
            NotImplementedError: If the kernel asked for by name cannot run the call; the message says why.
        """
        if sdpa_choice() is not None or self.leaves_it_to_torch(case.device):
            return SDPA
        if self.backend != "auto":
            if (reason := KERNELS[self.backend].objection(case)) is not None:
                raise NotImplementedError(
                    f'attention_backend={self.backend!r} cannot run this call: {reason}. Use attention_backend="auto", '
                    "or name another."
                )
            return self.backend
        if min(case.queries, case.keys) < self.shortest:
            return SDPA
        key = case.key
        if key not in self._records or self._records[key].late:
            self._wanted.add(key)
        nearest = self._nearest(key)
        name = SDPA if nearest is None else self._records[nearest].fastest(self._calls_per_shape)
        return name if name == SDPA or KERNELS[name].objection(case) is None else SDPA

    def name_for(self, query: Tensor, key: Tensor, masked: bool, with_lse: bool) -> str:
        """As `choose`, at a small part of its time from the second call of a shape on."""
        call = _facts(query, key, masked, with_lse)
        name = self._names_of_calls.get(call)
        if name is None:
            case = AttentionCase.of(query, key, masked=masked, with_lse=with_lse)
            name = self._names_of_calls[call] = self.choose(case)
        return name

    def kernel_for(self, query: Tensor, key: Tensor, masked: bool, with_lse: bool) -> AttentionKernel:
        """Returns the kernel that runs a call, also where torch's own pick is to return its log-sum-exp."""
        name = self.name_for(query, key, masked, with_lse)
        if name != SDPA:
            return KERNELS[name]
        call = _facts(query, key, masked, with_lse)
        if call not in self._kernels_of_calls:
            case = AttentionCase.of(query, key, masked=masked, with_lse=with_lse)
            self._kernels_of_calls[call] = kernel_of_torch(case).name
        return KERNELS[self._kernels_of_calls[call]]

    def _nearest(self, key: AttentionKey) -> AttentionKey | None:
        distances = {known: key.distance(known) for known in self._records}
        near = [(distance, known) for known, distance in distances.items() if distance is not None]
        return min(near)[1] if near else None

    def _names(self, device: torch.device) -> list[str]:
        if self._candidates is not None:
            return list(self._candidates)
        return [name for name in KERNELS if name != "math"] if device.type == "cuda" else []

    def expect(self, micro_batches_per_shape: float) -> None:
        """Says how many micro-batches of a shape the run has, over which a kernel's longer first time is spread.

        So a run that is too short to earn cuDNN's plans takes another kernel. To be called by all ranks alike, before
        the first step or between two steps.
        """
        before = self.chosen
        self._calls_per_shape = _LAYERS * micro_batches_per_shape
        self._forget_calls()
        often = (
            f"{micro_batches_per_shape:.1f} batches" if math.isfinite(micro_batches_per_shape) else "ever more batches"
        )
        for kind, name in self.chosen.items():
            if name != before[kind]:
                self._say(f"Attention of {kind}: {name}, as a shape comes in {often}.")

    def _forget_calls(self) -> None:
        self._names_of_calls.clear()
        self.version += 1

    # -- deciding ------------------------------------------------------------------------------------------------

    def prepare(self, device: torch.device) -> None:
        """Says what can run on a device, and reads what earlier runs have measured; collective over all ranks.

        Raises:
            NotImplementedError: If the kernel asked for by name cannot run there; the message says why.
        """
        self._device = device
        if self.backend not in ("auto", SDPA):
            if (reason := KERNELS[self.backend].unusable(device)) is not None:
                raise NotImplementedError(
                    f"attention_backend={self.backend!r} cannot run on {device_name(device)}: {reason}. Use "
                    'attention_backend="auto", or name another.'
                )
            self._say(f"Attention runs on {self.backend}, as asked for.")
            return
        if self.leaves_it_to_torch(device):
            if self.backend != SDPA:
                self._say(f"Attention runs on torch's own pick: there is no other kernel to choose on {device.type}.")
            return
        usable = self._usable()
        if rank_in_world() == 0:
            self._records |= RecordFile(device_name(device), self._folder).read()
        self._records = of_first_rank(self._records)
        reasons = {name: reason for name, reason in usable.items() if reason is not None}
        others = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        known = f", {len(self._records)} kinds of calls were measured before" if self._records else ""
        names = ", ".join(["torch's own pick", *(name for name in usable if name not in reasons)])
        others = f" ({others})" if others else ""
        self._say(f"Attention on {device_name(device)} is chosen from {names}{known}{others}.")
        self._report_changes()

    def settle(self) -> None:
        """Measures what was asked for since the last time; collective over all ranks, between two steps.

        It takes at most 2 s for a kind of call, beside what kernels need to compile and to start, and 20 s in a run;
        what is left then goes by the nearest that was measured. Kernels whose turn did not come in the 2 s have it the
        next time. Nothing of it is done where all is known.

        Raises:
            RuntimeError: If `prepare` was not called before.
        """
        if self._device is None:
            raise RuntimeError("AttentionChoices.settle comes after prepare(device), which all ranks call first.")
        if self.leaves_it_to_torch(self._device) or self.backend != "auto":
            return
        asked_for = {key for wanted in gather_over_ranks(self._wanted) for key in wanted}
        keys = sorted(key for key in asked_for if key not in self._records or self._records[key].late)
        self._wanted.clear()
        if not keys:
            return
        usable, measured = [name for name, reason in self._usable().items() if reason is None], {}
        for number, key in enumerate(keys):
            if self._seconds_left <= 0:
                self._say(
                    f"Attention: {len(keys) - number} kinds of calls go by the nearest that was measured, since "
                    f"measuring has taken the {_SECONDS_OF_RUN:.0f} s that it may take in a run."
                )
                break
            begin = time.perf_counter()
            known = self._records.get(key)
            records = gather_over_ranks(self._measuring.measure(key, known.late if known else usable, self._device))
            measured[key] = slowest_of_ranks(records).after(known)
            self._seconds_left -= max(gather_over_ranks(time.perf_counter() - begin))
            choice = measured[key].fastest(self._calls_per_shape)
            self._say(f"Attention of {key}: {measured[key].describe(choice)}.")
        self._records |= measured
        self._wanted = {key for key, record in measured.items() if record.late}
        self._forget_calls()
        self._report_changes()
        if rank_in_world() == 0 and measured:
            RecordFile(device_name(self._device), self._folder).add(measured)

    def _usable(self) -> dict[str, str | None]:
        """Why kernels cannot run on some rank, by name; None where they can on all."""
        assert self._device is not None
        mine = {name: KERNELS[name].unusable(self._device) for name in self._names(self._device)}
        return {
            name: next((reasons[name] for reasons in every if reasons[name] is not None), None)
            for every in [gather_over_ranks(mine)]
            for name in mine
        }

    def _say(self, line: str) -> None:
        if rank_in_world() == 0:
            self.log(line)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def chosen(self) -> dict[str, str]:
        """What was chosen, by kind of call."""
        return {str(key): record.fastest(self._calls_per_shape) for key, record in self._records.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the backend that was asked for, and what was chosen."""
        return {"backend": self.backend, "chosen": self.chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Says, now and when more is measured, where attention runs on another kernel than before a checkpoint."""
        if state["backend"] != self.backend:
            self._say(f"Attention: attention_backend={self.backend!r}; it was {state['backend']!r} in the checkpoint.")
        self._before = dict(state["chosen"])
        self._report_changes()

    def _report_changes(self) -> None:
        now = self.chosen
        for kind, before in self._before.items():
            if kind in now and now[kind] != before:
                self._say(f"Attention of {kind} runs on {now[kind]}, and ran on {before} before the checkpoint.")
        self._before = {kind: before for kind, before in self._before.items() if kind not in now}


def _facts(query: Tensor, key: Tensor, masked: bool, with_lse: bool) -> tuple[Any, ...]:
    """All by which a choice may differ; asked for in every call."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return query.shape, key.shape[2], query.dtype, query.device, masked, with_lse, deterministic, sdpa_choice()


_OF_PROCESS = {backend: AttentionChoices(backend) for backend in get_args(AttentionBackend)}
"""What calls share that name a kernel; made here, since compiled code cannot make them."""


def as_choices(backend: AttentionBackend | AttentionChoices) -> AttentionChoices:
    """Returns choices as they are, and for a name those of this process."""
    return backend if isinstance(backend, AttentionChoices) else _OF_PROCESS[backend]
