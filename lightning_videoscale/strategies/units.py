"""What is sharded together: the units of `fully_shard`, and their common start on all ranks.

Every transformer block is a unit, gathered when the block runs and freed after it; what a network holds beside its
blocks is another. What the LightningModule trains outside of these networks (a bare ``nn.Parameter``, an embedding)
forms the last unit, gathered for the whole of ``training_step``. Manual optimization runs backward and the optimizer
inside that step, and such a unit would be freed at the first backward and not be gathered again, nor would all of its
gradients be averaged: there every child of the LightningModule is a unit, gathered when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.diffusers import block_classes
from lightning_videoscale.compat.torch.autograd import is_view
from lightning_videoscale.compat.torch.modules import change_tensors, non_persistent_buffers
from lightning_videoscale.compat.torch.trees import is_wrapper, plain_tensors, tree_map_only
from lightning_videoscale.strategies.blocks import find_blocks
from lightning_videoscale.strategies.precision import (
    block_policy,
    gathers_in_bfloat16,
    rounded_by_autocast,
    stored_dtype_policy,
)

_UNTIE = "{} are shared with modules that are sharded apart from theirs: untie them, or train under ulysses_ddp."


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together when their module runs.

    Attributes:
        path: Where the module is in the LightningModule; ``""`` is the LightningModule itself.
        parameters: Some or all of the parameters under the module.
        policy: In which dtype they are gathered and their gradients reduced.
    """

    path: str
    parameters: tuple[nn.Parameter, ...]
    policy: MixedPrecisionPolicy

    @property
    def is_rounded(self) -> bool:
        """Whether parameters are gathered in another dtype than they are stored in."""
        dtype = self.policy.param_dtype
        return dtype is not None and any(parameter.dtype is not dtype for parameter in self.parameters)


def plan_units(root: nn.Module, networks: Iterable[str], plugin: Precision, *, whole_step: bool = True) -> list[Unit]:
    """Divides the parameters of a LightningModule into units, outer modules first.

    Args:
        root: The LightningModule, not yet sharded.
        networks: Paths of networks to shard block by block; they must be used by calling them.
        plugin: The Trainer's precision.
        whole_step: Whether what else is trained stays gathered for a whole step; else each child when it is called.

    Raises:
        ValueError: If trainable parameters of one unit differ in dtype, or, without ``whole_step``, some are the
            LightningModule's own.
    """
    units: list[Unit] = []
    taken: set[nn.Parameter] = set()

    def add(path: str, parameters: Iterable[nn.Parameter], policy: MixedPrecisionPolicy) -> None:
        mine = tuple(dict.fromkeys(p for p in parameters if p not in taken and not is_quantized(p)))
        dtypes = {parameter.dtype for parameter in mine if parameter.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"The trainable parameters of {path or 'the LightningModule'} are stored in several dtypes "
                f"({sorted(map(str, dtypes))}) and cannot be sharded together: load the model in one dtype. Some of "
                "diffusers' keep modules in float32 beside another torch_dtype=: load those in float32, and have "
                "precision='bf16-mixed' compute in bfloat16."
            )
        taken.update(mine)
        units.append(Unit(path, mine, policy))

    for path in networks:
        network = root.get_submodule(path)
        blocks = {name: set(block.parameters()) for name, block in _blocks(network).items()}
        if gathers_in_bfloat16(plugin):
            blocks = {name: rounded_by_autocast(network, name) for name in blocks}
        in_blocks = set().union(*blocks.values())
        # The network before its blocks: it also holds those of their parameters that are gathered in float32, and
        # `fully_shard` does not look into what is sharded already.
        add(path, (p for p in network.parameters() if p not in in_blocks), stored_dtype_policy(plugin))
        for name, parameters in blocks.items():
            ordered = (p for p in network.get_submodule(name).parameters() if p in parameters)
            add(
                f"{path}.{name}",
                ordered,
                block_policy(plugin),
            )
    inner, units = units, []
    for path in [""] if whole_step else _called_children(root):
        elsewhere = [p for p in root.get_submodule(path).parameters() if p.requires_grad and p not in taken]
        if elsewhere:
            add(path, elsewhere, stored_dtype_policy(plugin))
    bare = [name for name, p in root.named_parameters() if p.requires_grad and p not in taken]
    if bare:
        raise ValueError(
            f"{bare} are trained by manual optimization and belong to no module that is called, so FSDP2 could not "
            "gather them: put them into a child module and use them in its forward."
        )
    return units + inner


def _called_children(root: nn.Module) -> list[str]:
    """Paths of a module's children; containers, which nobody calls, stand for theirs."""
    found: list[str] = []
    for name, child in root.named_children():
        inner = _called_children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [""]
        found += [f"{name}.{path}" if path else name for path in inner]
    return found


def _blocks(network: nn.Module) -> dict[str, nn.Module]:
    try:
        return find_blocks(network)
    except ValueError:  # a network without blocks is one unit
        return {}


def declared_networks(root: nn.Module) -> list[str]:
    """Returns the outermost modules whose class declares its blocks, as those of diffusers and transformers do."""
    found: list[str] = []
    for path, module in root.named_modules():
        if path and block_classes(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def apart(root: nn.Module, paths: Iterable[str]) -> list[str]:
    """Returns the paths without those whose module contains, or lies in, one before: nothing can be sharded twice.

    An adapter around a network (peft's ``PeftModel``) declares the network's blocks as its own, and one network may
    have several paths, as where the LightningModule keeps both the adapter and what it is around.
    """
    kept: dict[str, set[nn.Module]] = {}
    for path in paths:
        mine = set(root.get_submodule(path).modules())
        if not any(
            root.get_submodule(other) in mine or root.get_submodule(path) in theirs for other, theirs in kept.items()
        ):
            kept[path] = mine
    return list(kept)


def sharded_modules(root: nn.Module) -> list[str]:
    """Returns the paths of the modules to which ``fully_shard`` was applied."""
    return [path or type(root).__name__ for path, module in root.named_modules() if isinstance(module, FSDPModule)]


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The class of a module; ``fully_shard`` puts one of its own before it, whose name configurations would tell."""
    bases = (base for base in type(module).__mro__ if issubclass(base, nn.Module))
    return next(base for base in bases if not issubclass(base, FSDPModule))


def shard_units(root: nn.Module, units: Iterable[Unit], mesh: DeviceMesh, device: torch.device) -> None:
    """Shards every unit over the mesh, starting from rank 0's values; collective over all ranks.

    Raises:
        ValueError: If a trainable parameter, or a module, is shared between units, or a parameter has no elements, or
            sparse gradients.
    """
    units = list(units)
    if lacking := _without_shards(root, units):
        raise ValueError(
            f"{lacking} cannot be sharded, as they have no elements, or sparse gradients: freeze or remove the former, "
            "leave out sparse=True of the latter's modules, or train under ulysses_ddp."
        )
    if shared := _used_beside(root, units):
        raise ValueError(_UNTIE.format(shared))
    for unit in units:
        module = root.get_submodule(unit.path)
        broadcast_from_first(unit.parameters, device)
        fully_shard(
            module,
            mesh=mesh,
            # A step of the LightningModule may call its forward and go on: its own parameters stay for the whole step.
            reshard_after_forward=bool(unit.path),
            mp_policy=unit.policy,
            ignored_params=set(module.parameters()) - set(unit.parameters),
        )
    if shared := untracked_parameters(root):
        raise ValueError(_UNTIE.format(shared))


def _without_shards(root: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Returns the names of parameters whose gradients FSDP2 cannot reduce."""
    reduced = {parameter for unit in units for parameter in unit.parameters if parameter.requires_grad}
    return [
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in reduced and (parameter.numel() == 0 or getattr(module, "sparse", False) is True)
    ]


def _used_beside(root: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Returns the names of parameters whose module is in two units that lie beside each other: one gathers them."""
    modules = {unit.path: root.get_submodule(unit.path) for unit in units}
    inside = {path: set(module.modules()) for path, module in modules.items()}
    gathered_with = {parameter: unit.path for unit in units for parameter in unit.parameters}
    return [
        f"{path}.{name}"
        for path, module in modules.items()
        for name, parameter in module.named_parameters()
        if (other := gathered_with.get(parameter)) is not None
        and module.get_submodule(name.rpartition(".")[0]) in inside[other]
        and module not in inside[other]
        and modules[other] not in inside[path]
    ]


def return_own_tensors(module: nn.Module) -> None:
    """Has a module copy the views among its outputs; to be called before it is sharded.

    FSDP2 learns from its hooks on outputs that backward begins. A view loses its hook where a caller changes it in
    place, as ``velocity -= target`` does, and parameters would not be gathered again.
    """
    module.register_forward_hook(_copy_views)


def _copy_views(_module: nn.Module, _args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, _own, output)


def _own(x: Tensor) -> Tensor:
    return x.clone() if x.requires_grad and is_view(x) else x


def untracked_parameters(root: nn.Module) -> list[str]:
    """Returns the names of trainable parameters that are not sharded, whose gradients nobody would average."""
    return [
        name
        for name, parameter in root.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a frozen parameter is made of other tensors, as quantized weights are: numbers, their scales and more.

    Collectives know plain tensors only, and nobody else knows how to divide them. Some say so themselves.
    """
    known = isinstance(parameter, DTensor) or hasattr(parameter, "fsdp_pre_all_gather")
    return not (parameter.requires_grad or known) and bool(is_wrapper(parameter))


def replicated_tensors(root: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters and buffers that are not sharded."""
    return (tensor for tensor in chain(root.parameters(), root.buffers()) if not isinstance(tensor, DTensor))


def broadcast_from_first(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Moves tensors to the device, in place, with rank 0's values; leaves those on the meta device alone.

    Ranks that built their model from random numbers of their own would otherwise each keep a shard of another model.
    """
    for tensor in tensors:
        if is_wrapper(tensor):
            broadcast_from_first(plain_tensors(tensor), device)
        elif not tensor.is_meta:
            tensor.data = tensor.data.to(device).contiguous()
            dist.broadcast(_sendable(tensor.data), 0)


def _sendable(x: Tensor) -> Tensor:
    """A tensor as its bytes where its dtype is one of eight bits, of which backends know the integers alone."""
    return x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x


def materialize(root: nn.Module, device: torch.device) -> list[str]:
    """Gives memory and initial values to what was built on the meta device; the rest keeps its values.

    Args:
        root: The LightningModule.
        device: Of the new tensors.

    Returns:
        Names of parameters and buffers whose modules have no ``reset_parameters``: a checkpoint must bring their
        values.

    Raises:
        ValueError: If no checkpoint can, as they are buffers that checkpoints leave out.
    """
    undefined: list[str] = []
    lost: list[str] = []
    for path, module in root.named_modules():
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        names = [name for name, tensor in own if tensor.is_meta]
        if not names:
            continue
        change_tensors(module, lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
            continue
        for name in names:
            saved = name not in non_persistent_buffers(module)
            (undefined if saved else lost).append(f"{path}.{name}" if path else name)
    if lost:
        raise ValueError(
            f"The buffers {lost} were built on the meta device, and neither their modules' reset_parameters() nor a "
            "checkpoint brings their values: build these modules on a real device."
        )
    return undefined
