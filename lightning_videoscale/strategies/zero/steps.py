"""ZeRO's optimizer steps what has a gradient, and counts the steps of each parameter, as torch's does: `ZeroSteps`.

ZeRO gives its base optimizer one flat piece in the place of many parameters, with zeros for gradients that are missing.
Momentum, weight decay and the number of steps would go on there, where torch passes a parameter without a gradient
over: one that is frozen after some steps, or that belongs to an expert which the timestep does not choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_videoscale.compat.deepspeed import (
    data_parallel_group,
    flat_pieces,
    is_of_deepspeed,
    ranges,
    stepping_optimizers,
)
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.undo import Undo

Common = dict[str, Any]
"""States that are one for all elements of a parameter, such as the number of steps."""


@dataclass(eq=False)
class _Run:
    """Neighbours in a piece that have a gradient and one history.

    Attributes:
        flat: The piece.
        start: Where they begin in it.
        stop: Where they end.
        common: What they have in common; None before their first step.
        parameters: The parameters.
    """

    flat: Tensor
    start: int
    stop: int
    common: Common | None
    parameters: list[nn.Parameter]

    @cached_property
    def part(self) -> Tensor:
        """Their elements, which the base optimizer gets: one object, by which it keeps its states."""
        return self.of(self.flat)

    def of(self, whole: Tensor) -> Tensor:
        """Their elements of a tensor like the piece, a view."""
        return whole.detach()[self.start : self.stop]


class ZeroSteps:
    """Gives the base optimizer, as long as a piece's parameters are not all alike, views of those with a gradient.

    Args:
        optimizer: ZeRO's optimizer.
        device: Where the ranks can talk.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._device = device
        pieces = flat_pieces(optimizer) or []
        self._pieces = {piece.flat: piece.parameters for piece in pieces}
        self._ranges = {piece.flat: ranges(piece) for piece in pieces}
        self._parameters = [parameter for piece in pieces for parameter in piece.parameters]
        self._with_gradient: set[nn.Parameter] = set()
        self._common: dict[Tensor, dict[nn.Parameter, Common | None]] = {}  # of pieces with different histories
        self._groups: list[dict[str, Any]] = []  # during a step, the base optimizer's own
        self._whole: list[tuple[dict[str, Any], list[Tensor]]] = []  # during a step, what these held before
        self._runs: dict[Tensor, list[_Run]] = {}  # of the step under way
        self.close = Undo()
        for parameter in filter(lambda p: p.requires_grad, self._parameters):
            self.close.add(parameter.register_post_accumulate_grad_hook(self._with_gradient.add).remove)
        for base in stepping_optimizers(optimizer) if pieces else []:
            self.close.add(base.register_step_pre_hook(self._divide).remove)
            self.close.add(base.register_step_post_hook(self._join).remove)

    def begin(self) -> None:
        """To be called before the first backward of a step."""
        self._with_gradient.clear()

    def agree(self) -> None:
        """To be called after the last backward of a step: what has a gradient on any rank is stepped on all."""
        flags = [parameter in self._with_gradient for parameter in self._parameters]
        on_host = torch.tensor(flags, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        anywhere = on_host.to(self._device, non_blocking=True)  # a copy of pageable memory waits for the device
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=data_parallel_group())
        if not all(flags):  # else the host need not wait for the result
            self._with_gradient.update(p for p, has in zip(self._parameters, anywhere.tolist(), strict=True) if has)

    def common(self, flat: Tensor) -> dict[nn.Parameter, Common | None] | None:
        """What each parameter of a piece has of common states, portable, None before its first step; collective.

        None in all if they are one for all, which the base optimizer has.
        """
        if flat not in self._common:
            return None
        parameters, common = self._pieces[flat], self._common[flat]
        once = {id(own): portable(own) for own in common.values() if own is not None}
        held = {i: once.get(id(common[p])) for i, p in enumerate(parameters) if p in self._ranges[flat]}
        merged: dict[int, Common | None] = {}
        for theirs in gather_over_ranks(held):
            merged.update(theirs)
        return {parameter: merged[i] for i, parameter in enumerate(parameters)}

    def set_common(self, flat: Tensor, common: Mapping[nn.Parameter, Common]) -> None:
        """Goes on with histories that differ; those of one history share one object, and who has none never stepped."""
        self._common[flat] = {parameter: common.get(parameter) for parameter in self._pieces[flat]}

    def _divide(self, base: Optimizer, *_: Any) -> None:
        self._groups = base.param_groups
        self._whole = [(group, group["params"]) for group in self._groups]
        for group, flats in self._whole:
            group["params"] = [part for flat in flats for part in self._parts(base, flat)]
        if self._runs and is_of_deepspeed(base):  # its fused ones take one count for all that is in a group
            base.param_groups = [group | {"params": [part]} for group in self._groups for part in group["params"]]

    def _parts(self, base: Optimizer, flat: Tensor) -> list[Tensor]:
        parameters, state = self._pieces[flat], base.state.get(flat, {})
        if flat not in self._common:
            if self._with_gradient.issuperset(parameters):
                return [flat]
            self._common[flat] = dict.fromkeys(parameters, common_states(state, flat) if state else None)
        self._runs[flat] = self._find_runs(flat)
        for run in self._runs[flat]:
            run.part.grad = run.of(flat.grad)  # type: ignore[arg-type]  # which ZeRO has set
            if run.common is not None:
                own = {key: run.of(value) for key, value in state.items() if is_per_element(value, flat)}
                base.state[run.part] = own | deepcopy(run.common)
        return [run.part for run in self._runs[flat]]

    def _find_runs(self, flat: Tensor) -> list[_Run]:
        runs: list[_Run] = []
        for parameter, where in self._ranges[flat].items():
            if parameter not in self._with_gradient:
                continue
            common = self._common[flat][parameter]
            if runs and runs[-1].common is common and runs[-1].stop == where.start:
                runs[-1].parameters.append(parameter)
                runs[-1].stop = where.stop
            else:
                runs.append(_Run(flat, where.start, where.stop, common, [parameter]))
        return runs

    @torch.no_grad()
    def _join(self, base: Optimizer, *_: Any) -> None:
        base.param_groups = self._groups
        for group, flats in self._whole:
            group["params"] = flats
        for flat, runs in self._runs.items():
            renewed: dict[int, Common] = {}  # by the history that it goes on from
            for run in runs:
                state = base.state.pop(run.part, {})
                _keep(state, run, base.state[flat], flat)
                common = renewed.setdefault(id(run.common), common_states(state, run.part))
                self._common[flat].update(dict.fromkeys(run.parameters, common))
        self._runs = {}


def is_per_element(value: Any, flat: Tensor) -> bool:
    """Whether a state has a value for every element of what is stepped."""
    return isinstance(value, Tensor) and value.shape == flat.shape


def common_states(state: Mapping[str, Any], flat: Tensor) -> Common:
    """The other states, those that there are."""
    return {key: value for key, value in state.items() if value is not None and not is_per_element(value, flat)}


def portable(common: Common) -> dict[str, Tensor]:
    """Common states on the host, where what is unpickled lies on no other rank's device."""
    return {key: torch.as_tensor(value, dtype=torch.float32).cpu() for key, value in common.items()}


def _keep(state: Mapping[str, Any], run: _Run, whole: dict[str, Any], flat: Tensor) -> None:
    """Takes over the states that a run's first step has made, or a step has made anew."""
    for key, value in state.items():
        if is_per_element(value, run.part):
            if key not in whole:
                whole[key] = torch.zeros_like(flat.detach(), dtype=value.dtype)
            kept = run.of(whole[key])
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)
