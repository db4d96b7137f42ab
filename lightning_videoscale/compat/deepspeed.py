"""The bookkeeping of ZeRO, read in DeepSpeed 0.19, which is imported only where a function needs it.

ZeRO keeps flat pieces of float32 copies and optimizer states in the place of parameters. DeepSpeed's public functions
(``safe_get_full_fp32_param`` and its like) go parameter by parameter. They do not tell which piece belongs to which,
and need states to be there that only a first step makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_videoscale.compat.names import Package
from lightning_videoscale.compat.patching import Method
from lightning_videoscale.compat.torch.autograd import hooks_on_grad

DEEPSPEED = Package("deepspeed", "0.19")


class FlatPiece(NamedTuple):
    """What this rank keeps of some parameters as one flat tensor.

    Attributes:
        parameters: The parameters.
        flat: This rank's piece of their float32 copies, which is what the base optimizer updates.
        group: Index of their parameter group.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    group: int


def flat_pieces(optimizer: Any) -> list[FlatPiece] | None:
    """Reads stage 3, stages 1 and 2, and stage 1 with bfloat16 and float32 accumulation; None if it is none of them."""
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
        return None
    return [FlatPiece(list(own), flat, group) for own, flat, group in zip(parameters, flats, groups, strict=True)]


def swaps_to_disk(optimizer: Any) -> bool:
    """Whether the states of ZeRO's optimizer are offloaded to NVMe."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def base_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer that ``configure_optimizers`` returned, inside of ZeRO's."""
    base: Optimizer = DEEPSPEED.get(optimizer, "optimizer")
    return base


def is_of_deepspeed(base: Optimizer) -> bool:
    """Whether a base optimizer is one of DeepSpeed's own, which count their steps in Python."""
    return any(cls.__module__.startswith("deepspeed.") for cls in type(base).__mro__)


def stepping_optimizers(optimizer: Any) -> list[Optimizer]:
    """The base optimizer, and the one that steps what stage 3 keeps on the device where it offloads a part only."""
    backup: Optimizer | None = getattr(optimizer, "backup_optimizer", None)
    return [base_optimizer(optimizer)] + ([] if backup is None else [backup])


def ranges(piece: FlatPiece) -> dict[nn.Parameter, range]:
    """Where this rank's parts of the parameters lie in its piece, in order; without those that it has no part of."""
    found: dict[nn.Parameter, range] = {}
    end = 0
    for parameter in piece.parameters:
        if is_partitioned(parameter):
            start, end = end, end + DEEPSPEED.get(parameter, "partition_numel")()
            found[parameter] = range(start, end)
        elif (mapping := DEEPSPEED.get(parameter, "_hp_mapping")) is not None:
            address = mapping.get_hp_fragment_address()
            found[parameter] = range(address.start, address.start + address.numel)
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def changed_beside_copies(parameters: Iterable[nn.Parameter], optimizer: Any) -> list[nn.Parameter]:
    """Those that differ from what ZeRO keeps of them on this rank, as whatever changed them has left that alone.

    Stages 1 and 2 keep float32 copies of what trains. Stage 3 keeps pieces, of which it makes whole parameters, and
    float32 copies of those pieces that train.
    """
    pairs = [(parameter, *pair) for parameter in parameters if (pair := _shown_and_kept(parameter)) is not None]
    pairs += _pieces_and_copies(optimizer)
    flags = [_differ(shown, kept.to(shown)) for _, shown, kept in pairs]
    differ = torch.stack(flags).tolist() if flags else []  # waits for the device once
    return [parameter for (parameter, _, _), differs in zip(pairs, differ, strict=True) if differs]


def _differ(shown: Tensor, kept: Tensor) -> Tensor:
    return ((shown != kept) & ~kept.isnan()).any()


def _shown_and_kept(parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
    """This rank's part of a parameter, as the model shows it and as ZeRO keeps it."""
    if is_partitioned(parameter):
        if not is_gathered(parameter):
            return None
        count = _unpadded(parameter)
        return own_piece(parameter, parameter.detach())[:count], own_values(parameter)[:count]
    if (mapping := getattr(parameter, "_hp_mapping", None)) is None:
        return None
    address = mapping.lp_fragment_address
    return parameter.detach().flatten().narrow(0, address.start, address.numel), mapping.get_hp_fragment().detach()


def _pieces_and_copies(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
    """This rank's pieces of the parameters that stage 3 trains, with their float32 copies."""
    if getattr(optimizer, "zenflow", False):  # steps what matters most at once, and its copies later
        return
    for piece in flat_pieces(optimizer) or []:
        for parameter, place in ranges(piece).items():
            if is_partitioned(parameter):
                values, copy = own_values(parameter), piece.flat.detach()[place.start : place.stop]
                if len(values) == len(copy) == len(place):  # else one of them is on disk
                    count = _unpadded(parameter)
                    yield parameter, values[:count], copy[:count]


def _unpadded(parameter: nn.Parameter) -> int:
    """How many elements this rank's piece has of a partitioned parameter; the last ranks' are padded."""
    size = len(own_values(parameter))
    before = size * dist.get_rank(DEEPSPEED.get(parameter, "ds_process_group"))
    return min(size, max(full_numel(parameter) - before, 0))


def link_states(parameters: list[nn.Parameter], flat: Tensor, states: Any) -> None:
    """Lets the parameters of a piece of stages 1 and 2 know their part of the base optimizer's states."""
    link = DEEPSPEED.get("deepspeed.utils", "lazy_init_hp_params_optimizer_state")
    link(parameters, flat, states)


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether it is one of stage 3, of which each rank holds a piece."""
    return hasattr(parameter, "ds_id")


def hooked_by_deepspeed(parameter: nn.Parameter) -> bool:
    """Whether hooks of DeepSpeed's see its gradient."""
    return any(hook.__module__.startswith("deepspeed.") for hook in hooks_on_grad(parameter))


def full_shape(value: Any) -> torch.Size:
    """Shape of a tensor, also of a parameter that is partitioned at the moment."""
    shape: torch.Size = value.ds_shape if hasattr(value, "ds_shape") else value.shape
    return shape


def full_numel(parameter: Tensor) -> int:
    """Elements of a tensor, also of a parameter that is partitioned at the moment."""
    count: int = getattr(parameter, "ds_numel", parameter.numel())
    return count


def own_values(parameter: Any) -> Tensor:
    """What this rank holds of a parameter, no copy: its piece under stage 3, else the whole."""
    values: Tensor = DEEPSPEED.get(parameter, "ds_tensor").data if is_partitioned(parameter) else parameter.data
    return values


def is_gathered(parameter: Any) -> bool:
    """Whether it is one of stage 3 that is whole at the moment."""
    available = DEEPSPEED.get("deepspeed.runtime.zero.partition_parameters", "ZeroParamStatus").AVAILABLE
    return is_partitioned(parameter) and DEEPSPEED.get(parameter, "ds_status") == available


def own_piece(parameter: Any, value: Tensor) -> Tensor:
    """This rank's piece of a whole tensor, for a partitioned parameter; the last ranks' are padded."""
    size = DEEPSPEED.get(parameter, "ds_tensor").numel()
    group = DEEPSPEED.get(parameter, "ds_process_group")
    flat = value.flatten()
    padded = nn.functional.pad(flat, (0, size * dist.get_world_size(group) - flat.numel()))
    return padded.narrow(0, size * dist.get_rank(group), size)


def forget_gradients(optimizer: Any) -> None:
    """Zeroes what stage 3 holds of an earlier step's gradients, if the next backward is the first of a step.

    DeepSpeed writes there what a backward gives, and clips by the norm of all of it: a parameter that takes no part in
    a step, such as those of an expert that its timestep does not choose, would count with its last gradient once more.
    """
    buffer: Tensor | None = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is None or optimizer.micro_step_id > 0:
        return
    buffer.zero_()
    for flat in optimizer.fp32_partitioned_groups_flat:
        if flat.grad is not None:  # the copy of an offloaded optimizer
            flat.grad.zero_()


_OF_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale(optimizer: Any) -> dict[str, float]:
    """What changes of the dynamic loss scale that 16-bit floats need; empty where there is none.

    Its settings, such as the length of its window, come from the configuration.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {name: DEEPSPEED.get(scaler, name) for name in _OF_LOSS_SCALE}


def set_loss_scale(optimizer: Any, saved: Mapping[str, float]) -> None:
    """Goes on with what `loss_scale` returned, if this run has a dynamic scale."""
    if loss_scale(optimizer):
        vars(optimizer.loss_scaler).update(saved)


def data_parallel_group() -> dist.ProcessGroup:
    """Returns the group that ZeRO's reductions run in, which DeepSpeed makes for itself."""
    group: dist.ProcessGroup = DEEPSPEED.get("deepspeed.utils.groups", "_get_data_parallel_group")()
    return group


def zero_waits(optimizer: Any) -> list[Method]:
    """The methods in which ZeRO's optimizer waits for other ranks; there is no hook around them.

    DeepSpeed's other optimizers reduce at the end of backward only.
    """
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is not None:  # stage 3
        coordinator = DEEPSPEED.get(offload, "get_param_coordinator")()
        reduction = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
        found = [Method(coordinator, "fetch_sub_module"), Method(optimizer, reduction)]
    elif any(base.__name__ == "DeepSpeedZeroOptimizer" for base in type(optimizer).__mro__):  # stages 1 and 2
        found = [Method(optimizer, "reduce_ipg_grads")]
    else:
        return []
    for method in found:
        DEEPSPEED.get(*method)
    return found
