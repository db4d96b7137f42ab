"""Optimizer states by parameter name instead of by position, so that they fit any order and any division into ranks.

torch numbers the parameters of an optimizer through all of its groups; here they are called as in the module's
``state_dict``. Why not by torch.distributed.checkpoint.state_dict is in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_videoscale.compat.deepspeed import full_shape
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.strategies.lightning_messages import first_names

Names = tuple[str, ...]
"""All names of one parameter: a shared one has several, of which the first is saved."""


class ParameterNames:
    """The names of a module's parameters, as in its ``state_dict``."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[nn.Parameter, Names] = {}
        # First the state_dict, which hides the layers that wrappers add; then what hooks may keep out of it.
        for name, value in [*module.state_dict(keep_vars=True).items(), *module.named_parameters()]:
            if isinstance(value, nn.Parameter) and name not in self._names.get(value, ()):
                self._names[value] = (*self._names.get(value, ()), name)
        self._in_order = [self._names[parameter] for parameter in module.parameters()]
        self._shapes = {names[0]: full_shape(parameter) for parameter, names in self._names.items()}

    @property
    def in_order(self) -> list[Names]:
        """The names of all parameters, trained or not, in the module's order."""
        return self._in_order

    def count_fitting(self, states: dict[int, dict[str, Any]], order: Sequence[Names]) -> int:
        """Returns how many states by position would be of their parameter's shape if parameters had this order."""
        return sum(
            any(shape == self._shapes[order[position][0]] for shape in _shapes(values))
            for position, values in states.items()
        )

    def __getitem__(self, parameter: nn.Parameter) -> Names:
        """Returns the names of a parameter.

        Raises:
            CheckpointError: If the module does not have it.
        """
        if parameter not in self._names:
            raise CheckpointError(
                f"An optimizer holds a parameter of shape {tuple(parameter.shape)} that is not among those of the "
                "LightningModule: register it there, or the checkpoint could not name it."
            )
        return self._names[parameter]

    def of(self, optimizer: Optimizer) -> list[list[Names]]:
        """Returns the names of an optimizer's parameters, per group."""
        return [[self[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def to_names(state: dict[str, Any], names: Sequence[Sequence[Names]]) -> dict[str, Any]:
    """Returns an optimizer's ``state_dict`` with names, given per group, in the place of positions."""
    return _to_names(state, [aliases[0] for group in names for aliases in group])


def _to_names(state: dict[str, Any], by_position: Sequence[str]) -> dict[str, Any]:
    return state | {
        "state": {by_position[position]: value for position, value in state["state"].items()},
        "param_groups": [
            group | {"params": [by_position[position] for position in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def from_names(state: dict[str, Any], optimizer: Optimizer, all_names: ParameterNames) -> dict[str, Any]:
    """Returns what ``torch.optim.Optimizer.load_state_dict`` takes; reads tensors as the parameters lie.

    Args:
        state: As `to_names` returned it, tensors possibly still to be read; or an optimizer's own ``state_dict``.
        optimizer: What is to load it.
        all_names: Names of the module's parameters.

    Raises:
        CheckpointError: If the groups differ from those of the checkpoint.
    """
    groups, names = optimizer.param_groups, all_names.of(optimizer)
    state = named(state, names, all_names)
    saved_groups = check_groups(
        state, names, trainable=[[p.requires_grad for p in group["params"]] for group in groups]
    )
    by_position: dict[int, dict[str, Any]] = {}
    merged: list[dict[str, Any]] = []
    position = 0
    for group, saved_group, group_names in zip(groups, saved_groups, names, strict=True):
        merged.append(group | saved_group | {"params": list(range(position, position + len(group_names)))})
        for parameter, aliases in zip(group["params"], group_names, strict=True):
            name = next((name for name in aliases if name in state["state"]), None)
            if name is not None:
                values = SavedTensors.of(state["state"][name])
                by_position[position] = {key: values.read(key, _like(values, key, parameter)) for key in values}
            position += 1
    return state | {"state": by_position, "param_groups": merged}


def named(state: dict[str, Any], names: Sequence[Sequence[Names]], all_names: ParameterNames) -> dict[str, Any]:
    """Returns a saved optimizer state by name, also if it came from a file of Lightning's, where it is by position.

    Args:
        state: What was saved.
        names: Names of the optimizer's parameters now, per group.
        all_names: Names of the module's parameters.

    Raises:
        CheckpointError: If the groups have other numbers of parameters, or positions that no parameter has.
    """
    positions = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    if all(isinstance(position, str) for position in positions):
        return state
    saved, now = [[len(group) for group in side] for side in ([g["params"] for g in state["param_groups"]], names)]
    order = list(chain.from_iterable(names))
    # torch counts through an optimizer's groups. FSDPStrategy and ModelParallelStrategy count all that the module has.
    by_module = all_names.in_order
    if max(positions, default=0) < len(by_module) and (
        positions != list(range(len(positions)))
        or (saved == now and _fits_better(state["state"], by_module, order, all_names))
    ):
        order = by_module
    elif saved != now:
        raise CheckpointError(
            f"The file holds an optimizer whose groups have {saved} parameters, and this one's have {now}."
        )
    return _to_names(state, [aliases[0] for aliases in order])


def _fits_better(
    states: dict[int, dict[str, Any]], order: Sequence[Names], than: Sequence[Names], all_names: ParameterNames
) -> bool:
    return all_names.count_fitting(states, order) > all_names.count_fitting(states, than)


def _shapes(values: dict[str, Any]) -> list[torch.Size]:
    return [value.shape for value in values.values() if isinstance(value, Tensor) and value.ndim]


def check_groups(
    state: dict[str, Any], names: Sequence[Sequence[Names]], trainable: Sequence[Sequence[bool]]
) -> list[dict[str, Any]]:
    """Returns the settings of the saved groups, such as their learning rate, without their parameters.

    Raises:
        CheckpointError: If a group lacks a parameter for which there is a state, or trains one that was not in it.
    """
    groups = state["param_groups"]
    if len(groups) != len(names):
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(groups)} parameter groups, and this one has {len(names)}."
        )
    for index, (group, group_names, group_trains) in enumerate(zip(groups, names, trainable, strict=True)):
        now = {name for aliases in group_names for name in aliases}
        lost = [name for name in group["params"] if name in state["state"] and name not in now]
        before = set(group["params"])
        new = [a[0] for a, trains in zip(group_names, group_trains, strict=True) if trains and before.isdisjoint(a)]
        if lost or new:
            raise CheckpointError(
                f"Parameter group {index} of the optimizer differs from the checkpoint's: "
                f"{first_names(lost)} had a state there and are not in it now, {first_names(new)} are new. Give it "
                "the same parameters, or start from the weights alone, without ckpt_path=: "
                "module.load_state_dict(vs.strategies.read_weights(path), strict=False)."
            )
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _like(values: SavedTensors, key: str, parameter: nn.Parameter) -> Tensor | None:
    """What a state is placed and sharded like: the parameter, for states of its shape."""
    return parameter if parameter.ndim and values.shape(key) == parameter.shape else None
