"""Sequence parallelism over sharded parameters: `SequenceParallelFSDP2Strategy`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.compat.lightning import optimizers_to_device, set_device_mesh, set_up_processes, timeout_of
from lightning_videoscale.compat.torch.data_parallel import end_passes, note_dtypes
from lightning_videoscale.graphs import GraphMode, no_graphs
from lightning_videoscale.parallel import SequenceMesh, SplitPlan
from lightning_videoscale.parallel.layout import Size, SizeOfGroup
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.transport import TransportName
from lightning_videoscale.strategies.checkpoints.gathering import is_sharded
from lightning_videoscale.strategies.compilation import CompileOptions
from lightning_videoscale.strategies.generators import seed_generators
from lightning_videoscale.strategies.gradient_hooks import refuse_before_sharding, refuse_uncalled
from lightning_videoscale.strategies.lightning_messages import first_names
from lightning_videoscale.strategies.mixin import SequenceParallelMixin
from lightning_videoscale.strategies.network_changes import check_present, split_plans
from lightning_videoscale.strategies.precision import FSDP2_PRECISIONS, check_precision, refuse_outside_of_autocast
from lightning_videoscale.strategies.settings import SequenceParallelSettings, check_paths
from lightning_videoscale.strategies.sharded.calls import watch_calls
from lightning_videoscale.strategies.sharded.earlier import refuse_sharded, refuse_zero
from lightning_videoscale.strategies.sharded.second_backward import refuse_second_backward
from lightning_videoscale.strategies.units import (
    apart,
    broadcast_from_first,
    declared_networks,
    materialize,
    plan_units,
    replicated_tensors,
    return_own_tensors,
    shard_units,
    sharded_modules,
    untracked_parameters,
)
from lightning_videoscale.strategies.weight_averaging import check_weight_averaging
from lightning_videoscale.strategies.whole_parameters import check_pruning

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class _FSDP2Settings(SequenceParallelSettings):
    """Beside what all strategies share, what the ranks must agree on here."""

    replicas: int
    shard_frozen: list[str] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        replicas: Any = self.replicas
        if not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"replicas={replicas!r} must be a whole number of at least 1.")
        check_paths("shard_frozen", self.shard_frozen)


class SequenceParallelFSDP2Strategy(SequenceParallelMixin, ModelParallelStrategy):
    """Fully sharded parameters, gradients and optimizer states, whose ranks also share sequences.

    As `SequenceParallelDDPStrategy`, but each rank keeps only a slice of every parameter. Each transformer block is
    gathered when it runs and freed after it; gradients are averaged over all ranks and equal those of one device with
    the group's batch. The LightningModule needs no ``configure_model``; one that it has is respected, also where it
    builds on the meta device, but must leave ``fully_shard`` to the strategy. Registered as ``"ulysses_fsdp2"``.

    Sharded block by block are the networks whose sequence is split and others that train and whose class declares its
    blocks (as diffusers' and transformers' do); a network must then be used by calling it. What else is trained is
    gathered for the whole step; a module that optimizes manually runs backward and steps within, and there every child
    that trains is gathered when it is called. What is frozen is kept whole on every rank, as is what is quantized in
    networks that train.

    Precisions are 32-true, bf16-mixed, bf16-true and 64-true. Under bf16-mixed the blocks' linear layers and
    convolutions are gathered in bfloat16 and the results are those of DDP (see `precision`); gradients are always
    averaged in float32 or more.

    Args:
        replicas: Copies of the model, each sharded over ``world size / replicas`` neighbouring ranks (hybrid sharding).
            With one copy per node, parameters are gathered inside the nodes and only gradients cross them.
        shard_frozen: Paths of frozen networks to shard too, such as a large text encoder.
        graphs: False or ``"auto"``, which is the same here: parameters are gathered to other memory in every step.
        process_group_backend: As for Lightning's ``ModelParallelStrategy``.

    Other arguments are as for `SequenceParallelDDPStrategy`.

    Raises:
        ValueError: If ``graphs`` is True. By the Trainer, if its precision is not supported. At the start of ``fit``,
            as `SequenceParallelDDPStrategy` does, or if the devices do not form whole replicas, the model is sharded
            already, a callback of Lightning's averages or prunes weights, or a LightningModule that optimizes manually
            has trainable parameters of its own rather than in a child.
        RuntimeError: As `SequenceParallelDDPStrategy` does.
    """

    def __init__(
        self,
        ulysses_size: Size = None,
        ring_size: Size = None,
        modules: list[str] | None = None,
        plan: SplitPlan | None = None,
        activation_checkpointing: bool | float = False,
        compile: CompileOptions = False,
        replicas: int = 1,
        shard_frozen: list[str] | None = None,
        transport: TransportName = "collective",
        schedule: ScheduleSetting = "serial",
        sp_size: SizeOfGroup = None,
        verify_plan: bool = True,
        save_frozen: bool | None = None,
        attention_backend: AttentionBackend = "auto",
        graphs: GraphMode = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._sharding = _FSDP2Settings(
            ulysses_size,
            ring_size,
            modules,
            plan,
            activation_checkpointing,
            replicas,
            shard_frozen,
            compile=compile,
            transport=transport,
            schedule=schedule,
            sp_size=sp_size,
            verify_plan=verify_plan,
            save_frozen=save_frozen,
            attention_backend=attention_backend,
            graphs=no_graphs(graphs, type(self).__name__),
        )
        self._init_sequence_parallel(self._sharding)
        self._sharded: weakref.WeakSet[pl.LightningModule] = weakref.WeakSet()
        self._undefined: list[str] = []
        self._kept_whole: list[tuple[str, nn.Parameter]] = []

    @override
    def setup_environment(self) -> None:
        plugin = self.precision_plugin  # which may be an object, of which the Trainer's precision says nothing
        check_precision(getattr(plugin, "precision", type(plugin).__name__), type(self).__name__, FSDP2_PRECISIONS)
        check_weight_averaging(self._module.trainer, type(self).__name__)
        check_pruning(self._module.trainer, type(self).__name__)
        # Not the parent's: it would also build a mesh (data_parallel, tensor_parallel).
        set_up_processes(self)
        self._create_mesh(self.num_processes, timeout_of(self))

    @override
    def _publish(self, mesh: SequenceMesh) -> None:
        super()._publish(mesh)
        set_device_mesh(self, mesh.device_mesh)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        # Not the parent's: it refuses a LightningModule without configure_model, and one tensor on the meta device
        # makes it reinitialize all tensors of the LightningModule.
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        _evaluate_without_inference_mode(trainer)
        if self._module in self._sharded:
            end_passes(self._module)  # which an exception in the run before may have left under way
        else:
            refuse_sharded(self._module, type(self).__name__)
            refuse_zero(self._module, type(self).__name__, hooks=True)
        self._change_model()
        self.model = self.precision_plugin.convert_module(self._module)
        if self._module not in self._sharded:
            self._shard(self._module)
            self._sharded.add(self._module)
        self._count_calls()
        self._agree_on_calls()
        self._note_frozen()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: pl.LightningModule) -> None:
        """Shards a LightningModule unit by unit, so that a device never holds the whole of it; collective."""
        wanted = self._sharding.shard_frozen or []
        check_present("shard_frozen", wanted, module)
        paths = [*wanted, *split_plans(module, self.mesh, self._settings), *declared_networks(module)]
        networks = [
            path
            for path in apart(module, paths)
            if path in wanted or any(parameter.requires_grad for parameter in module.get_submodule(path).parameters())
        ]
        units = plan_units(module, networks, self.precision_plugin, whole_step=module.automatic_optimization)
        refuse_before_sharding(module, chain.from_iterable(unit.parameters for unit in units))
        outermost = list(apart(module, (unit.path for unit in units if unit.path)))
        for path in outermost:
            return_own_tensors(module.get_submodule(path))
        shard_units(module, units, self.mesh.sharding(self._sharding.replicas), self.root_device)
        seed_generators(self._seed, "initial weights")  # on all ranks the same, as replicas must start equal
        self._undefined = materialize(module, self.root_device)
        self.model_to_device()
        broadcast_from_first(replicated_tensors(module), self.root_device)
        # Lightning calls the steps of a LightningModule, not its forward, on which FSDP2's hooks are. A LightningModule
        # that trains nothing of its own has no hooks: its networks, entered through their forward, are roots each.
        if isinstance(module, FSDPModule):
            for step in _STEPS:
                register_fsdp_forward_method(module, step)
        named = module.named_parameters(remove_duplicate=False)
        self._kept_whole = [(name, p) for name, p in named if not p.requires_grad and not is_sharded(p)]
        note_dtypes(module)
        for path in networks:
            _refuse_inference_mode_at_first(module.get_submodule(path), path)
        for path in dict.fromkeys((*networks, *outermost)):
            watch_calls(module.get_submodule(path))
        for path in outermost:
            refuse_second_backward(module.get_submodule(path))
        for unit in units:
            if unit.is_rounded:
                refuse_outside_of_autocast(module.get_submodule(unit.path), unit.path, self.root_device)
        self._save_together(module)
        count = sum(bool(unit.parameters) for unit in units)
        rank_zero_info(f"FSDP2: {count} units over {self.world_size} ranks, {self._sharding.replicas} replica(s).")

    @property
    @override
    def _gathers_in_forward(self) -> bool:
        return True

    @property
    @override
    def _ranks_that_gather(self) -> range:
        size = self.world_size // self._sharding.replicas
        first = self.global_rank // size * size
        return range(first, first + size)

    @override
    def _shares_parameters(self, network: nn.Module) -> bool:
        return bool(sharded_modules(network))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_backward(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_backward(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_backward(super().predict_step, *args, **kwargs)

    def _without_backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Frees the LightningModule's own gathered parameters, as backward does after a training step."""
        self._refuse_undefined()
        output = step(*args, **kwargs)
        module: Any = self.lightning_module
        if isinstance(module, FSDPModule):
            module.reshard()
        return output

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        has_gradients = False

        def noting() -> Any:
            nonlocal has_gradients
            result = closure()
            has_gradients = True
            return result

        try:
            return super().optimizer_step(optimizer, noting, *args, **kwargs)
        except Exception as error:
            if has_gradients and not isinstance(error, torch.OutOfMemoryError):
                error.add_note(
                    f"{type(optimizer).__name__} was at its step. Under {type(self).__name__} parameters and gradients "
                    "are shards, DTensors, which not every optimizer can compute with: torch's Adam, AdamW, SGD and "
                    "Muon can. Else train under ulysses_ddp."
                )
            raise

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._undefined = [name for name in self._undefined if name not in checkpoint["state_dict"]]

    def _refuse_undefined(self) -> None:
        if self._undefined:
            raise ValueError(
                f"{self._undefined} were built on the meta device and nothing defines their values. Give their modules "
                "a reset_parameters(), build them on a real device, or start from a checkpoint that has them, with "
                "ckpt_path=."
            )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_uncalled(self._module)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._refuse_undefined()
        unfrozen = untracked_parameters(self._module)
        if unfrozen:
            raise ValueError(_describe_unfrozen(unfrozen))

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Who adds what was frozen to an optimizer may fail at that: torch compares no whole tensors with shards.
        unfrozen = [name for name, parameter in self._kept_whole if parameter.requires_grad]
        if unfrozen and _describe_unfrozen(unfrozen) != str(exception):
            exception.add_note(_describe_unfrozen(unfrozen))
        super().on_exception(exception)


def _describe_unfrozen(names: list[str]) -> str:
    return (
        f"{first_names(names)} were frozen, hence kept whole, when the model was sharded, and train now. Name their "
        "network in shard_frozen=[...], or let them require gradients before fit, and freeze them in on_fit_start if "
        "they are to train later."
    )


def _refuse_inference_mode_at_first(network: nn.Module, path: str) -> None:
    """Has a network refuse inference mode in its first call, as tensors that FSDP2 makes then serve all others."""

    def refuse(*_: Any) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{path} is called in torch.inference_mode() before its first step. FSDP2 would keep what it gathers "
                "first for all later calls, which could not train. Use torch.no_grad(), or sample after a step."
            )
        handle.remove()

    handle = network.register_forward_pre_hook(refuse, prepend=True)


def _evaluate_without_inference_mode(trainer: pl.Trainer) -> None:
    """Has validation, tests and predictions run under ``no_grad`` alone.

    Tensors that FSDP2 gathers in inference mode stay in its units and cannot be read outside of it. Lightning does the
    same for its FSDPStrategy and over gloo.
    """
    validation = trainer.fit_loop.epoch_loop.val_loop
    for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
