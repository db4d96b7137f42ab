"""Checkpoints without what is frozen: the code that builds the model brings it again, and fingerprints say whether.

A frozen parameter is left out if it is what it was when ``fit`` set the model up. One that was changed since, such as
that of a teacher that follows its student, or of a base that another checkpoint brought, is saved. So are all buffers,
and adapters that are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.deepspeed import full_numel, full_shape
from lightning_videoscale.compat.torch.trees import is_wrapper
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.checkpoints.adapters import adapter_parameters
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.fingerprints import Fingerprint
from lightning_videoscale.strategies.checkpoints.gathering import gather_parameter
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors, StoredTensor
from lightning_videoscale.strategies.checkpoints.shares import RankAssignment
from lightning_videoscale.strategies.units import is_quantized

LEFT_OUT = "left_out"
"""Where in our part of a checkpoint the fingerprints are, by the parameters' names."""

_WITH_PARAMETERS = ("state_dict", "current_model_state")
"""Parts of a checkpoint that hold the model's parameters; Lightning's weight averaging adds the second."""


def frozen_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Returns what is frozen and belongs to no adapter, by the names in the ``state_dict``.

    Without tensors of classes of their own whose bytes nobody here knows; quantized ones that consist of plain tensors
    are among them.
    """
    added = adapter_parameters(root)
    return {
        name: value
        for name, value in root.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter) and not value.requires_grad and value not in added
        if type(value) is nn.Parameter or is_wrapper(value)
    }


def quantized_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Returns those of `frozen_parameters` that a checkpoint cannot hold, as no file says what their classes are."""
    return {name: value for name, value in frozen_parameters(root).items() if is_quantized(value)}


@torch.no_grad()
def fingerprints(parameters: Mapping[str, nn.Parameter], device: torch.device) -> dict[str, Fingerprint]:
    """Returns the fingerprints of whole parameters, the same on all ranks, which share the work; collective."""
    shares, mine = RankAssignment(dist.get_world_size()), {}
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in parameters.items():
        first_names.setdefault(parameter, name)
    for parameter, name in first_names.items():
        whole = gather_parameter(parameter, device)
        if shares.next(full_numel(parameter)) == dist.get_rank():
            mine[name] = Fingerprint.of(whole, device)
    found = {name: fingerprint for theirs in gather_over_ranks(mine) for name, fingerprint in theirs.items()}
    return {name: found[first_names[parameter]] for name, parameter in parameters.items()}


def unchanged(start: Mapping[str, Fingerprint], root: nn.Module, device: torch.device) -> dict[str, Fingerprint]:
    """Returns those fingerprints whose parameters are frozen and still have the same; collective."""
    now = fingerprints({name: value for name, value in frozen_parameters(root).items() if name in start}, device)
    return {name: fingerprint for name, fingerprint in now.items() if fingerprint == start[name]}


def without(checkpoint: dict[str, Any], left_out: Iterable[str], root: nn.Module) -> dict[str, Any]:
    """Returns a checkpoint from which copies of parameters are gone that are left out, such as those in an average.

    A copy that differs from its parameter stays.
    """
    held = root.state_dict()
    gone = set(left_out)

    def is_copy(name: str, value: Any) -> bool:
        return name in gone and isinstance(value, Tensor) and _is_equal(value, held[name])

    return checkpoint | {
        part: {name: value for name, value in checkpoint[part].items() if not is_copy(name, value)}
        for part in _WITH_PARAMETERS
        if part in checkpoint
    }


def put_back(checkpoint: dict[str, Any], left_out: Mapping[str, Any], root: nn.Module, device: torch.device) -> None:
    """Puts the model's own parameters in a checkpoint where it leaves them out, in place; collective.

    Raises:
        CheckpointError: If a parameter is missing in the model, or is not what it was in the run that saved.
    """
    held = {name: value for name, value in root.state_dict(keep_vars=True).items() if name in left_out}
    check_base({name: Fingerprint.from_dict(saved) for name, saved in left_out.items()}, fingerprints(held, device))
    for part in _WITH_PARAMETERS:
        if part in checkpoint:
            saved = SavedTensors.of(checkpoint[part])
            for name, parameter in held.items():
                if name not in saved:
                    saved.put(name, _standing_for(parameter, device))
            checkpoint[part] = saved


def check_base(then: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> None:
    """Refuses another base than that of the run which saved.

    Raises:
        CheckpointError: If a parameter is missing or differs, with some of them.
    """
    missing = {name: "is not there" for name in then if name not in now}
    different = {name: now[name].difference(then[name]) for name in then if name in now}
    wrong = missing | {name: difference for name, difference in different.items() if difference is not None}
    if wrong:
        some = "; ".join(f"{name} {difference}" for name, difference in list(wrong.items())[:3])
        raise CheckpointError(
            f"The checkpoint leaves out {len(then)} frozen parameters, and {len(wrong)} of them are not what they were "
            f"when it was saved: {some}. Build the model from the same weights in the same way, as by from_pretrained "
            "of the same folder. Where that cannot be, save with save_frozen=True, an argument of the strategy."
        )


def _standing_for(parameter: nn.Parameter, device: torch.device) -> StoredTensor:
    def read(like: Tensor | None) -> Tensor:
        if isinstance(parameter, DTensor) and not isinstance(like, DTensor):
            return gather_parameter(parameter, device).cpu()
        return parameter.detach() if isinstance(parameter, DTensor) else gather_parameter(parameter, device)

    return StoredTensor(full_shape(parameter), read, held=True)


def _is_equal(value: Tensor, held: Any) -> bool:
    plain = not is_wrapper(value) and not is_wrapper(held)
    return plain and value.dtype == held.dtype and value.shape == held.shape and value.equal(held.to(value.device))
