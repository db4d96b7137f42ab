"""What is trained, as this rank holds it: what callbacks average, and let the network compute with for a while.

Strategies that keep a rank's share elsewhere than in whole parameters answer themselves (`HasTrainedWeights`). Under
Lightning's strategies that keep parameters whole, `ParameterWeights` reads the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

AVERAGES = "lightning_videoscale/averages"
"""The entry of a checkpoint that holds averaged weights by name, which nobody else's has."""

LocalValues = Mapping[str, Tensor]
"""One value for every element that this rank keeps of what is trained, under keys that stay the same in a run."""


class TrainedWeights(Protocol):
    """This rank's share of the trained weights, and other values for them."""

    def shares(self) -> dict[str, Tensor]:
        """Returns what the optimizer updates, no copies: shards, float32 masters, or whole parameters; local."""

    def show(self, shares: LocalValues) -> Callable[[], None]:
        """Lets the network compute with other values until the returned function is called.

        Collective over all ranks; the returned function is local, so that a rank that fails can call it. Meanwhile
        `shares` goes on to return what is trained.
        """

    def to_names(self, shares: LocalValues) -> dict[str, Tensor]:
        """Returns values by parameter name, as this rank writes them to a checkpoint; collective over all ranks."""

    def from_names(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns this rank's share of what `to_names` gave, whatever ranks saved it; collective over all ranks.

        What a checkpoint lacks has the trained values.
        """


@runtime_checkable
class HasTrainedWeights(Protocol):
    """A strategy that knows where the trained weights are."""

    def trained_weights(self) -> TrainedWeights:
        """Returns them; once the strategy is set up."""


def trained_weights_of(trainer: pl.Trainer) -> TrainedWeights:
    """Returns the trained weights under a Trainer's strategy, which is set up.

    Raises:
        ValueError: As `check_trained_weights`.
    """
    check_trained_weights(trainer)
    if isinstance(trainer.strategy, HasTrainedWeights):
        return trainer.strategy.trained_weights()
    return ParameterWeights(trainer.lightning_module)


def check_trained_weights(trainer: pl.Trainer) -> None:
    """Refuses strategies that keep what is trained where nobody here can read it.

    Raises:
        ValueError: If the strategy is one of Lightning's that share parameters out.
    """
    strategy = trainer.strategy
    if isinstance(strategy, HasTrainedWeights):
        return
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy):
        raise ValueError(
            f"Lightning's {type(strategy).__name__} shares the parameters out in a way of its own. Train under "
            "ulysses_fsdp2 or ulysses_deepspeed_stage_1, _2 or _3, with ulysses_size=1 where sequences are not split."
        )


class ParameterWeights:
    """Weights that are trained in the parameters themselves, whole or as ``DTensor``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: set[str] = set()  # of all that was trained, also if it is frozen later
        self._own: dict[str, Tensor] = {}  # while others are shown

    @torch.no_grad()
    def shares(self) -> dict[str, Tensor]:
        """See `TrainedWeights`."""
        return {name: self._own.get(name, _local(value)) for name, value in self._trained().items()}

    @torch.no_grad()
    def show(self, shares: LocalValues) -> Callable[[], None]:
        """See `TrainedWeights`; takes memory for what it replaces."""
        held = {name: _local(value) for name, value in self._trained().items() if name in shares}
        self._own = {name: value.clone() for name, value in held.items()}
        self._fill(shares)
        return self._show_own

    def to_names(self, shares: LocalValues) -> dict[str, Tensor]:
        """See `TrainedWeights`."""
        parameters, aliases = dict(self._module.named_parameters()), self._aliases()
        return {
            alias: sharded_like(parameters[name], share) if isinstance(parameters[name], DTensor) else share
            for name, share in shares.items()
            for alias in aliases[parameters[name]]
        }

    @torch.no_grad()
    def from_names(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `TrainedWeights`."""
        parameters, aliases = dict(self._module.named_parameters()), self._aliases()
        found: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            alias = next((alias for alias in aliases[parameter] if alias in saved), None)
            if alias is not None:
                found[name] = _local(self._read(saved, alias, parameter)).to(parameter.device)
        self._names |= found.keys()
        return {name: share.clone() for name, share in self.shares().items()} | found

    def _read(self, saved: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        value: Tensor = saved[name]
        return value

    def _aliases(self) -> Mapping[nn.Parameter, Iterable[str]]:
        aliases: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, []).append(name)
        return aliases

    def _trained(self) -> dict[str, nn.Parameter]:
        """By name, looked up anew: moving a module to another device can replace them."""
        found = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad or name in self._names
        }
        self._names |= found.keys()
        return found

    @torch.no_grad()
    def _show_own(self) -> None:
        self._fill(self._own)
        self._own = {}

    def _fill(self, shares: LocalValues) -> None:
        for name, parameter in self._trained().items():
            if name in shares:
                _local(parameter).copy_(shares[name])
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what was gathered of it has other values


def _local(value: Tensor) -> Tensor:
    """What this rank holds of a tensor; to be called without gradients."""
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def sharded_like(parameter: Any, share: Tensor) -> DTensor:
    """Returns what this rank's share is of: values that are sharded as a parameter is, which is a `DTensor`."""
    return DTensor.from_local(
        share,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
