"""Users' hooks on parameters' gradients, refused where they would see a part of a gradient, or nothing at all.

Optimizers that step within backward have such hooks, and those that move gradients to the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.torch.autograd import has_hooks, has_hooks_on_grad
from lightning_videoscale.strategies.lightning_messages import first_names


def refuse_before_averaging(module: nn.Module) -> None:
    """Refuses what runs as a parameter's ``.grad`` is made, before DDP averages it over the ranks.

    Raises:
        ValueError: If a trainable parameter has such a hook.
    """
    if found := _trained_with(module.named_parameters(), has_hooks_on_grad):
        raise ValueError(
            f"{found} have hooks by register_post_accumulate_grad_hook, as optimizers have that step within backward "
            "or move gradients to the host. DDP averages gradients after that, so each rank would train by those of "
            "its own part of the batch. Take ulysses_fsdp2, which calls them with averaged gradients if "
            "configure_optimizers registers them, or use gradients in on_before_optimizer_step."
        )


def refuse_local_averages(state: object, group: Collection[int], node: Collection[int]) -> None:
    """Refuses local SGD within less than a group, each of whose ranks has a part of every gradient.

    Args:
        state: DDP's ``ddp_comm_state``.
        group: The ranks that share sequences with this one.
        node: The ranks of this one's node, over which local SGD averages unless told otherwise.

    Raises:
        ValueError: If gradients would not be averaged over the group.
    """
    if not isinstance(state, PostLocalSGDState) or len(group) == 1:
        return
    averaged = node if state.subgroup is None else dist.get_process_group_ranks(state.subgroup)
    if not state.post_local_gradient_allreduce or not set(group) <= set(averaged):
        over = f"ranks {list(averaged)}" if state.post_local_gradient_allreduce else "no ranks"
        raise ValueError(
            f"From step {state.start_localSGD_iter} on, this PostLocalSGDState averages gradients over {over}, while "
            f"ranks {list(group)} share sequences and have a part of each gradient. Give it a subgroup= of whole "
            "groups, and post_local_gradient_allreduce=True."
        )


def refuse_before_sharding(module: nn.Module, sharded: Iterable[nn.Parameter]) -> None:
    """Refuses hooks on what is about to be sharded, as other parameters take its place.

    Raises:
        ValueError: If one of the ``sharded`` parameters has hooks on its gradient.
    """
    chosen = set(sharded)
    ours = ((name, parameter) for name, parameter in module.named_parameters() if parameter in chosen)
    if found := _trained_with(ours, lambda parameter: has_hooks(parameter) or has_hooks_on_grad(parameter)):
        raise ValueError(
            f"{found} have hooks on their gradients, which would be lost: FSDP2 puts shards into their place. Register "
            "them by register_post_accumulate_grad_hook in configure_optimizers, which comes after that."
        )


def refuse_uncalled(module: nn.Module) -> None:
    """Refuses hooks that FSDP2 never calls, as autograd makes no gradient of a shard.

    Raises:
        ValueError: If a shard has a hook by ``register_hook``.
    """
    shards = ((name, parameter) for name, parameter in module.named_parameters() if isinstance(parameter, DTensor))
    if found := _trained_with(shards, has_hooks):
        raise ValueError(
            f"{found} have hooks by register_hook, which FSDP2 never calls: take register_post_accumulate_grad_hook, "
            "whose hooks find the averaged gradient in .grad, and may change it."
        )


def _trained_with(parameters: Iterable[tuple[str, nn.Parameter]], has_hook: Callable[[Tensor], bool]) -> str:
    names = [name for name, parameter in parameters if parameter.requires_grad and has_hook(parameter)]
    return first_names(names) if names else ""
