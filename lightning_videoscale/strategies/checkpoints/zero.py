"""`PortableCheckpoints` for ZeRO, which keeps flat pieces of float32 copies in the place of parameters and states.

Parameter by parameter, and together, the ranks assemble what is saved and take their piece of what is loaded. No rank
ever holds more than one whole tensor beside its share: of what is assembled, each keeps an equal part to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.compat.deepspeed import base_optimizer, full_shape, loss_scale, set_loss_scale
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.optimizer_names import Names, ParameterNames, check_groups, named
from lightning_videoscale.strategies.checkpoints.portable import PortableCheckpoints
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.strategies.checkpoints.shares import RankAssignment
from lightning_videoscale.strategies.checkpoints.zero_partitions import (
    assemble,
    fill_states,
    gather,
    link_piece,
    load_states,
    pieces_of,
    set_parameter,
)
from lightning_videoscale.strategies.checkpoints.zero_weights import ZeroWeights
from lightning_videoscale.strategies.zero.steps import ZeroSteps
from lightning_videoscale.trained_weights import TrainedWeights

_LOSS_SCALE = "loss_scale"


class ZeroCheckpoints(PortableCheckpoints):
    """Goes before the mixin in the bases of the DeepSpeed strategy."""

    deepspeed_engine: Any
    _steps: ZeroSteps

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's share of the parameters, whole and in float32 where they are trained; collective."""
        trained, shares, left_out = self._trained(), RankAssignment(self.world_size), self._leave_out()
        state: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if name in left_out:
                continue
            if not isinstance(value, nn.Parameter):
                state[name] = value
                continue
            whole = assemble(value, self.root_device) if value in trained else gather(value)
            if shares.next(whole.numel()) == self.global_rank:
                state[name] = whole.cpu()
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns this rank's share of the optimizer's states by parameter name; collective."""
        pieces, names, shares = pieces_of(optimizer), self._names(), RankAssignment(self.world_size)
        state: dict[str, Any] = {}
        for piece in pieces:
            fill_states(piece)
            link_piece(piece)
            for parameter, common in piece.common(self._steps).items():
                values = {key: assemble(parameter, self.root_device, key) for key in piece.per_element}
                if shares.next(full_shape(parameter).numel()) == self.global_rank and common is not None:
                    state[names[parameter][0]] = {key: value.cpu() for key, value in values.items()} | common
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [aliases[0] for aliases in own]}
            for group, own in zip(
                base_optimizer(optimizer).param_groups, _names_per_group(optimizer, names), strict=True
            )
        ]
        return {"state": state, "param_groups": groups, _LOSS_SCALE: self._loss_scale(optimizer)}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        saved, trained = SavedTensors.of(checkpoint["state_dict"]), self._trained()
        held = self._module.state_dict(keep_vars=True)
        _check_names(saved, held, strict, type(self._module).__name__)
        for name, value in held.items():
            if name not in saved or saved.is_held(name):
                continue
            if isinstance(value, nn.Parameter):
                set_parameter(value, saved[name], trained=value in trained)
            elif isinstance(value, Tensor):
                value.copy_(saved[name])
            else:
                self._module.load_state_dict({name: saved[name]}, strict=False)

    @override
    def _load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        names = self._names()
        per_group = _names_per_group(optimizer, names)
        state = named(state, per_group, names)
        settings = check_groups(state, per_group, trainable=[[True] * len(group) for group in per_group])
        for group, saved_group in zip(base_optimizer(optimizer).param_groups, settings, strict=True):
            group.update(saved_group)
        for piece in pieces_of(optimizer):
            saved: dict[nn.Parameter, SavedTensors] = {}
            for parameter in piece.parameters:
                name = next((name for name in names[parameter] if name in state["state"]), None)
                if name is not None:
                    saved[parameter] = SavedTensors.of(state["state"][name])
            if saved:
                load_states(piece, saved, self._steps)
        if state.get(_LOSS_SCALE):  # neither other strategies nor other precisions have it
            set_loss_scale(optimizer, state[_LOSS_SCALE]["scaler"])
            self.deepspeed_engine.skipped_steps = state[_LOSS_SCALE]["skipped_steps"]

    def _loss_scale(self, optimizer: Optimizer) -> dict[str, Any]:
        """The dynamic loss scale, without which the first steps of a resumed run would overflow and be skipped."""
        scaler = loss_scale(optimizer)
        return {"scaler": scaler, "skipped_steps": self.deepspeed_engine.skipped_steps} if scaler else {}

    def trained_weights(self) -> TrainedWeights:
        """The float32 copies of what is trained, as this rank holds them; see `HasTrainedWeights`."""
        (optimizer,) = self.optimizers
        return ZeroWeights(
            self._module,
            pieces_of(optimizer),
            self.root_device,
            is_current=lambda: getattr(self.model, "optimizer", None) is optimizer,
        )

    def _trained(self) -> set[nn.Parameter]:
        """The parameters of which the engine keeps float32 copies."""
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            return set()
        return {parameter for piece in pieces_of(self.optimizers[0]) for parameter in piece.parameters}


def _names_per_group(optimizer: Optimizer, names: ParameterNames) -> list[list[Names]]:
    per_group: list[list[Names]] = [[] for _ in base_optimizer(optimizer).param_groups]
    for piece in pieces_of(optimizer):
        per_group[piece.group] += [names[parameter] for parameter in piece.parameters]
    return per_group


def _check_names(saved: SavedTensors, held: Mapping[str, Any], strict: bool, model: str) -> None:
    missing, unexpected = [name for name in held if name not in saved], [name for name in saved if name not in held]
    shapes = {
        name: (tuple(saved.shape(name) or ()), tuple(full_shape(value)))
        for name, value in held.items()
        if name in saved and isinstance(value, Tensor) and saved.shape(name) != full_shape(value)
    }
    if shapes or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"The checkpoint does not fit {model}. Missing in the checkpoint: {missing}. Unexpected: {unexpected}. "
            f"Of other shape (saved, now): {shapes}. With LightningModule.strict_loading = False, what is missing or "
            "unexpected is passed over."
        )
