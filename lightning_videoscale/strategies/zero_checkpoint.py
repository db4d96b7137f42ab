"""`PortableCheckpoints` for ZeRO, which keeps flat pieces of float32 copies in the place of parameters and states.

Parameter by parameter, and together, the ranks assemble what is saved and take their piece of what is loaded. No rank
ever holds more than one whole tensor beside its share: of what is assembled, each keeps an equal part to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.strategies.checkpoint import PortableCheckpoints
from lightning_videoscale.strategies.checkpoint_folder import CheckpointError
from lightning_videoscale.strategies.optimizer_names import Names, ParameterNames, check_groups, named
from lightning_videoscale.strategies.saved_tensors import SavedTensors


class ZeroCheckpoints(PortableCheckpoints):
    """Goes before the mixin in the bases of the DeepSpeed strategy."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's share of the parameters, whole and in float32 where they are trained; collective."""
        assert self.lightning_module is not None
        trained, shares = self._trained(), _Shares(self.world_size)
        state: dict[str, Any] = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                state[name] = value
                continue
            whole = _assemble(value, self.root_device) if value in trained else _gather(value)
            if shares.next(whole.numel()) == self.global_rank:
                state[name] = whole.cpu()
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns this rank's share of the optimizer's states by parameter name; collective."""
        pieces, names, shares = _pieces(optimizer), self._names(), _Shares(self.world_size)
        state: dict[str, Any] = {}
        for piece in pieces:
            _link(piece)
            for parameter in piece.parameters:
                values = {key: _assemble(parameter, self.root_device, key) for key in piece.per_element}
                if shares.next(_shape(parameter).numel()) == self.global_rank:
                    state[names[parameter][0]] = {key: value.cpu() for key, value in values.items()} | piece.common
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [aliases[0] for aliases in own]}
            for group, own in zip(_base(optimizer).param_groups, _names_per_group(optimizer, names), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        saved, trained = SavedTensors.of(checkpoint["state_dict"]), self._trained()
        held = self.lightning_module.state_dict(keep_vars=True)
        _check_names(saved, held, strict, type(self.lightning_module).__name__)
        for name, value in held.items():
            if name not in saved:
                continue
            if isinstance(value, nn.Parameter):
                _set_parameter(value, saved[name], trained=value in trained)
            elif isinstance(value, Tensor):
                value.copy_(saved[name])
            else:
                self.lightning_module.load_state_dict({name: saved[name]}, strict=False)

    @override
    def _load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        names = self._names()
        per_group = _names_per_group(optimizer, names)
        state = named(state, per_group)
        settings = check_groups(state, per_group, trainable=[[True] * len(group) for group in per_group])
        for group, saved_group in zip(_base(optimizer).param_groups, settings, strict=True):
            group.update(saved_group)
        for piece in _pieces(optimizer):
            saved: dict[nn.Parameter, SavedTensors] = {}
            for parameter in piece.parameters:
                name = next((name for name in names[parameter] if name in state["state"]), None)
                if name is not None:
                    saved[parameter] = SavedTensors.of(state["state"][name])
            if saved:
                _load_piece(piece, saved)

    def _trained(self) -> set[nn.Parameter]:
        """The parameters of which the engine keeps float32 copies."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return set()
        return {parameter for piece in _pieces(self.optimizers[0]) for parameter in piece.parameters}


@dataclass(frozen=True)
class _Piece:
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
        return [key for key, value in kept.items() if _is_like(value, self.flat)]

    @property
    def common(self) -> dict[str, Tensor]:
        """The other states, such as the number of steps, which the parameters have in common."""
        kept = self.base.state.get(self.flat, {})
        return {
            key: torch.as_tensor(value, dtype=torch.float32).cpu()
            for key, value in kept.items()
            if not _is_like(value, self.flat) and value is not None
        }


def _pieces(optimizer: Any) -> list[_Piece]:
    """Reads ZeRO's bookkeeping: stage 3, stages 1 and 2, and stage 1 with bfloat16 and float32 accumulation."""
    if getattr(optimizer, "swap_optimizer", False):
        raise CheckpointError("Checkpoints of optimizer states that are offloaded to NVMe are not supported.")
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        parameters, flats = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(flats))]
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        parameters, flats = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
        groups = list(range(len(flats)))
    elif hasattr(optimizer, "fp32_groups_flat_partition"):
        parameters, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        groups = list(range(len(flats)))
    else:
        raise CheckpointError(f"DeepSpeed's {type(optimizer).__name__} is not ZeRO's: use stage 1, 2 or 3.")
    return [
        _Piece(list(own), flat, group, _base(optimizer))
        for own, flat, group in zip(parameters, flats, groups, strict=True)
    ]


def _base(optimizer: Any) -> Optimizer:
    base: Optimizer = optimizer.optimizer
    return base


def _names_per_group(optimizer: Optimizer, names: ParameterNames) -> list[list[Names]]:
    per_group: list[list[Names]] = [[] for _ in _base(optimizer).param_groups]
    for piece in _pieces(optimizer):
        per_group[piece.group] += [names[parameter] for parameter in piece.parameters]
    return per_group


def _assemble(parameter: nn.Parameter, device: torch.device, key: str | None = None) -> Tensor:
    """The float32 copy of a trained parameter, or one of its states; collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    held = parameter.data
    parameter.data = held.to(device)  # where the ranks can talk: after fit, Lightning has moved it to the CPU
    whole: Tensor = (
        safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)
    )
    parameter.data = held
    return whole


def _gather(parameter: nn.Parameter) -> Tensor:
    """A parameter that is not trained; collective."""
    if not _is_partitioned(parameter):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _set_parameter(parameter: nn.Parameter, value: Tensor, trained: bool) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if _is_partitioned(parameter):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(value)
        if trained:
            safe_set_local_fp32_param(parameter, _cut(parameter, value))
    else:
        parameter.data.copy_(value)
        if trained:
            safe_set_full_fp32_param(parameter, value)


def _load_piece(piece: _Piece, saved: Mapping[nn.Parameter, SavedTensors]) -> None:
    """Gives the base optimizer the states that it would only make in its first step, and fills them in."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    per_element: dict[str, None] = {}
    common: dict[str, list[float]] = {}
    for parameter, values in saved.items():
        for key in values:
            if key != "step" and values.shape(key) == _shape(parameter):
                per_element[key] = None
            elif values[key] is not None:
                common.setdefault(key, []).append(float(values[key]))
    state: dict[str, Any] = {key: torch.zeros_like(piece.flat.detach()) for key in per_element}
    state |= {key: _common_value(key, values, piece) for key, values in common.items()}
    piece.base.state[piece.flat] = state
    _link(piece)
    for parameter, values in saved.items():
        for key in per_element.keys() & values.keys():
            if _is_partitioned(parameter):
                safe_set_local_optimizer_state(parameter, _cut(parameter, values[key]), key)
            else:
                safe_set_full_optimizer_state(parameter, values[key], key)


def _link(piece: _Piece) -> None:
    """Lets the parameters of stages 1 and 2 know their part of the base optimizer's states, as a step would."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    if not _is_partitioned(piece.parameters[0]):
        lazy_init_hp_params_optimizer_state(piece.parameters, piece.flat, piece.base.state)


def _common_value(key: str, values: list[float], piece: _Piece) -> Tensor | int:
    if len(set(values)) > 1:
        rank_zero_warn(
            f"Parameters of one group have different values of {key!r} in the checkpoint ({min(values)} to "
            f"{max(values)}), and ZeRO keeps one for all: the largest is taken."
        )
    if type(piece.base).__module__.startswith("deepspeed."):
        return int(max(values))  # DeepSpeed's own optimizers count in Python
    settings = piece.base.param_groups[piece.group]
    on_device = settings.get("fused") or settings.get("capturable")
    return torch.tensor(max(values), device=piece.flat.device if on_device else "cpu")


def _cut(parameter: Any, value: Tensor) -> Tensor:
    """This rank's piece of a whole tensor, for a partitioned parameter; the last ranks' are padded."""
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    flat = value.flatten()
    padded = nn.functional.pad(flat, (0, size * dist.get_world_size(group) - flat.numel()))
    return padded.narrow(0, size * dist.get_rank(group), size)


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _shape(value: Any) -> torch.Size:
    shape: torch.Size = value.ds_shape if hasattr(value, "ds_shape") else value.shape
    return shape


def _is_like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _check_names(saved: SavedTensors, held: Mapping[str, Any], strict: bool, model: str) -> None:
    missing, unexpected = [name for name in held if name not in saved], [name for name in saved if name not in held]
    shapes = {
        name: (tuple(saved.shape(name) or ()), tuple(_shape(value)))
        for name, value in held.items()
        if name in saved and isinstance(value, Tensor) and saved.shape(name) != _shape(value)
    }
    if shapes or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"The checkpoint does not fit {model}. Missing in the checkpoint: {missing}. Unexpected: {unexpected}. "
            f"Of other shape (saved, now): {shapes}. With LightningModule.strict_loading = False, what is missing or "
            "unexpected is passed over."
        )


class _Shares:
    """Deals tensors out to ranks so that all hold about as many elements; the same on every rank."""

    def __init__(self, ranks: int) -> None:
        self._held = [0] * ranks

    def next(self, elements: int) -> int:
        """Returns the rank that takes the next tensor."""
        rank = self._held.index(min(self._held))
        self._held[rank] += elements
        return rank
