"""Sharded parameters made whole on rank 0, to save or to look at: `WholeParameters`.

After `fit` the parameters stay sharded: a model that is too large for one GPU would not fit elsewhere, and the next run
goes on with the shards. Whoever reads them as tensors, such as diffusers' and peft's functions that save, needs them
whole. They are gathered one by one, so that no device ever holds more than one, into the host memory of rank 0.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.compat.lightning import rewinds_weights, timeout_of
from lightning_videoscale.strategies.checkpoints.gathering import gather_parameter, is_sharded
from lightning_videoscale.strategies.failures.rendezvous import Rendezvous, note_exits
from lightning_videoscale.strategies.parent import StrategyPart
from lightning_videoscale.strategies.units import class_before_sharding
from lightning_videoscale.undo import Undo

_SAVE_METHODS = ("save_pretrained", "save_lora_adapter")
"""Of diffusers, transformers and peft."""


class WholeParameters(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _gathered: frozenset[nn.Parameter] = frozenset()
    """What is whole on rank 0 at the moment, as it is otherwise."""

    @contextmanager
    def whole_parameters(self, module: nn.Module) -> Iterator[None]:
        """Makes the parameters of a module whole on rank 0, to save or read them; collective over all ranks.

        ::

            with trainer.strategy.whole_parameters(module.transformer):
                if trainer.is_global_zero:
                    lora = get_peft_model_state_dict(module.transformer)

        Within, rank 0 has whole parameters in host memory, in their own dtype, and the class that the module had before
        it was sharded. The other ranks keep their shards, and wait at the end. Afterwards all is as it was, so that
        changes are lost. It works after a run and between its steps, under all our strategies; where nothing is
        sharded, nothing is gathered. ``save_pretrained`` and ``save_lora_adapter`` of a sharded network do this by
        themselves, when all ranks call them.

        Args:
            module: The LightningModule or a part of it. Rank 0 must have host memory for the whole of it.

        Raises:
            RuntimeError: If a rank does not come, or another rank failed within, or rank 0 calls the network within.
        """
        if self.world_size == 1 and not any(map(is_sharded, module.parameters())):
            yield
            return
        rendezvous = Rendezvous("whole_parameters", timeout_of(self) or default_pg_timeout)
        rendezvous.wait()
        sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
        before, undo = self._gathered, Undo()
        try:
            whole = {parameter: self._on_first(parameter) for parameter in sharded}
            if self.is_global_zero:
                _replace(module, whole, undo)
            self._gathered = before | set(sharded)
            yield
        except Exception as error:
            undo()
            self._gathered = before
            rendezvous.wait(error)
            raise
        undo()
        self._gathered = before
        rendezvous.wait()

    @torch.no_grad()
    def _on_first(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The whole parameter on rank 0, None elsewhere; collective over the ranks that share it."""
        whole = gather_parameter(parameter, self.root_device)
        return nn.Parameter(whole.cpu(), requires_grad=parameter.requires_grad) if self.is_global_zero else None

    def _save_together(self, module: nn.Module) -> None:
        """Lets the methods that save a sharded network gather it: all ranks call them, and rank 0 writes."""
        found = [
            (network, name)
            for network in module.modules()
            for name in _SAVE_METHODS
            if callable(getattr(type(network), name, None)) and not isinstance(vars(network).get(name), _SaveTogether)
            if any(map(is_sharded, network.parameters()))
        ]
        if found and self.world_size > 1:
            note_exits()
        for network, name in found:
            setattr(network, name, _SaveTogether(self, network, name))

    def holds_whole(self, module: nn.Module) -> bool:
        """Whether `whole_parameters` has gathered all that is sharded of a module, the same on all ranks."""
        return all(parameter in self._gathered for parameter in module.parameters() if is_sharded(parameter))


def check_pruning(trainer: pl.Trainer, strategy: str, *, allow_masks: bool = False) -> None:
    """Refuses to fit with a callback that prunes, as it ranks the values of whole parameters.

    With FSDP2's shards that ends in an error of torch's about placements, after the first epoch, and with those of ZeRO
    stage 3 in one about sizes. Under stages 1 and 2 parameters can be masked. But where the callback sets them back to
    their first values, the next step is made from ZeRO's own copies, which have not changed.

    Args:
        trainer: The Trainer.
        strategy: The strategy's name, for messages.
        allow_masks: Whether only setting weights back is refused.

    Raises:
        ValueError: If it is about to fit with such a `ModelPruning` of Lightning's.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found = [callback for callback in callbacks if isinstance(callback, ModelPruning)]
    refused = [type(c).__name__ for c in found if rewinds_weights(c) or not allow_masks]
    if refused and trainer.state.fn == TrainerFn.FITTING:
        others = "give it use_lottery_ticket_hypothesis=False" if allow_masks else "leave the callback out"
        raise ValueError(
            f"{refused} cannot {'set back' if allow_masks else 'prune'} the parameters that {strategy} shards: "
            f"Lightning's pruning needs whole ones. Train under ulysses_ddp or usp_ddp, or {others}."
        )


class _SaveTogether:
    """A method that saves a network, in front of its class's; a copy of the network has its class's again."""

    def __init__(self, strategy: WholeParameters, network: nn.Module, name: str) -> None:
        self._strategy, self._network, self._name = strategy, network, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        save = types.MethodType(getattr(type(self._network), self._name), self._network)
        if self._strategy.holds_whole(self._network):
            return save(*args, **kwargs) if self._strategy.is_global_zero else None
        with self._strategy.whole_parameters(self._network):
            return save(*args, **kwargs) if self._strategy.is_global_zero else None

    def __deepcopy__(self, memo: dict[int, Any]) -> types.MethodType:
        return types.MethodType(getattr(type(self._network), self._name), copy.deepcopy(self._network, memo))


def _replace(module: nn.Module, whole: dict[nn.Parameter, nn.Parameter | None], undo: Undo) -> None:
    """Puts whole parameters in the place of sharded ones, and each module's own class in the place of FSDP2's."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in whole:
                undo.add(partial(setattr, child, name, parameter))
                setattr(child, name, whole[parameter])
        if isinstance(child, FSDPModule):
            undo.add(partial(setattr, child, "__class__", type(child)))
            undo.add(child.register_forward_pre_hook(_refuse_call, prepend=True).remove)
            plain: Any = child
            plain.__class__ = class_before_sharding(child)


def _refuse_call(module: nn.Module, _: Any) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__} was called on rank 0 within whole_parameters, where its parameters can be read and "
        "saved only: to run the network, leave the block and call it on all ranks."
    )
