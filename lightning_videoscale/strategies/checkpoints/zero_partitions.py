"""ZeRO's flat partitions, called pieces here: where float32 copies and states of parameters are, read and set whole.

All functions that take a parameter are collective over all ranks, which call them for the same parameters in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_videoscale.compat.deepspeed import (
    base_optimizer,
    flat_pieces,
    full_shape,
    is_of_deepspeed,
    is_partitioned,
    link_states,
    own_piece,
    swaps_to_disk,
)
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.strategies.zero.steps import ZeroSteps, common_states, is_per_element, portable


@dataclass(frozen=True)
class Piece:
    """What ZeRO keeps of some parameters on this rank as one flat tensor.

    Attributes:
        parameters: The parameters.
        flat: This rank's piece of their float32 copies, which is what the base optimizer updates.
        group: Index of their parameter group.
        base: The base optimizer.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    group: int
    base: Optimizer

    @property
    def per_element(self) -> list[str]:
        """Names of the states that have a value for every element of the parameters."""
        kept = self.base.state.get(self.flat, {})
        return sorted(key for key, value in kept.items() if is_per_element(value, self.flat))

    def common(self, steps: ZeroSteps) -> dict[nn.Parameter, dict[str, Tensor] | None]:
        """The other states, such as the number of steps, None of what was never stepped; collective."""
        found = steps.common(self.flat)
        if found is None:
            own = portable(common_states(self.base.state.get(self.flat, {}), self.flat))
            found = dict.fromkeys(self.parameters, own)
        return found


def pieces_of(optimizer: Any) -> list[Piece]:
    """Reads ZeRO's bookkeeping: stage 3, stages 1 and 2, and stage 1 with bfloat16 and float32 accumulation.

    Raises:
        CheckpointError: If the states are offloaded to NVMe, or the optimizer is not ZeRO's.
    """
    if swaps_to_disk(optimizer):
        raise CheckpointError("Checkpoints of optimizer states that are offloaded to NVMe are not supported.")
    pieces = flat_pieces(optimizer)
    if pieces is None:
        raise CheckpointError(f"DeepSpeed's {type(optimizer).__name__} is not ZeRO's: use stage 1, 2 or 3.")
    return [Piece(*piece, base_optimizer(optimizer)) for piece in pieces]


def assemble(parameter: nn.Parameter, device: torch.device, key: str | None = None) -> Tensor:
    """Returns the float32 copy of a trained parameter, or one of its states, whole."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    held = parameter.data
    parameter.data = held.to(device)  # where the ranks can talk: after fit, Lightning has moved it to the CPU
    with _thawed(parameter):
        whole: Tensor = (
            safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)
        )
    parameter.data = held
    return whole


@contextmanager
def _thawed(parameter: nn.Parameter) -> Iterator[None]:
    """DeepSpeed's functions pass over what is frozen under stage 3, although it keeps what was trained before."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(trains)


def gather(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter that is not trained, whole."""
    if not is_partitioned(parameter):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def set_parameter(parameter: nn.Parameter, value: Tensor, trained: bool) -> None:
    """Gives a parameter its whole value, on every rank, and its float32 copy if it is trained."""
    import deepspeed

    if is_partitioned(parameter):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(value)
    else:
        parameter.data.copy_(value)
    if trained:
        set_master(parameter, value)


def set_master(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives the float32 copy of a trained parameter a value, which every rank has whole."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    with _thawed(parameter):
        if is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, own_piece(parameter, value))
        else:
            safe_set_full_fp32_param(parameter, value)


def load_states(piece: Piece, saved: Mapping[nn.Parameter, SavedTensors], steps: ZeroSteps) -> None:
    """Gives the base optimizer the states that it would only make in its first step, and fills them in."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    per_element: dict[str, None] = {}
    common: dict[nn.Parameter, dict[str, float]] = {parameter: {} for parameter in saved}
    for parameter, values in saved.items():
        for key in values:
            if key != "step" and values.shape(key) == full_shape(parameter):
                per_element[key] = None
            elif values[key] is not None:
                common[parameter][key] = float(values[key])
    state: dict[str, Any] = {key: torch.zeros_like(piece.flat.detach()) for key in per_element}
    piece.base.state[piece.flat] = state
    _load_common(piece, common, steps)
    link_piece(piece)
    for parameter, values in saved.items():
        with _thawed(parameter):
            for key in per_element.keys() & values.keys():
                if is_partitioned(parameter):
                    safe_set_local_optimizer_state(parameter, own_piece(parameter, values[key]), key)
                else:
                    safe_set_full_optimizer_state(parameter, values[key], key)


def _load_common(piece: Piece, saved: Mapping[nn.Parameter, dict[str, float]], steps: ZeroSteps) -> None:
    """One for all parameters if they are alike, else one for each history."""
    histories = {
        tuple(sorted(own.items())): {key: _common_value(value, piece) for key, value in own.items()}
        for own in saved.values()
    }
    if len(histories) == 1 and len(saved) == len(piece.parameters):
        piece.base.state[piece.flat].update(*histories.values())
    else:
        steps.set_common(
            piece.flat, {parameter: histories[tuple(sorted(own.items()))] for parameter, own in saved.items()}
        )


def fill_states(piece: Piece) -> None:
    """Zeroes the states that other ranks have of a piece and this one, which has stepped none of it yet, has not."""
    state = piece.base.state[piece.flat]
    for theirs in gather_over_ranks({key: state[key].dtype for key in piece.per_element}):
        for key in theirs.keys() - state.keys():
            state[key] = torch.zeros_like(piece.flat.detach(), dtype=theirs[key])


def link_piece(piece: Piece) -> None:
    """Lets the parameters of stages 1 and 2 know their part of the base optimizer's states, as a step would."""
    if not is_partitioned(piece.parameters[0]):
        link_states(piece.parameters, piece.flat, piece.base.state)


def _common_value(value: float, piece: Piece) -> Tensor | int:
    if is_of_deepspeed(piece.base):
        return int(value)
    settings = piece.base.param_groups[piece.group]
    on_device = settings.get("fused") or settings.get("capturable")
    return torch.tensor(value, device=piece.flat.device if on_device else "cpu")
