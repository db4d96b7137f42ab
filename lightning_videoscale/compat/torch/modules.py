"""What a module is made of: hooks, buffers, children."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.compat.torch import TORCH


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Callable[..., Any]], ...] | None:
    """Returns the module's own hooks before and after forward and backward, one mapping for each kind; None for none.

    Hooks can be registered and removed in public, but not be asked for.
    """
    own = module.__dict__
    try:
        before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
        before_backward, after_backward = own["_backward_pre_hooks"], own["_backward_hooks"]
        if before or after or before_backward or after_backward:
            return before, after, before_backward, after_backward
        return None
    except KeyError as error:
        raise TORCH.missing(module, "_forward_pre_hooks, or one of its like,") from error


def has_global_hooks() -> bool:
    """Whether `torch.nn.modules.module` calls hooks around every module, which can be registered only."""
    home = "torch.nn.modules.module"
    names = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"
    return any(TORCH.get(home, name) for name in names)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or it is what ``torch.compile(module)`` returned.

    ``OptimizedModule`` is private, and its import loads all of Dynamo: it is known by the child that it wraps.
    """
    return TORCH.get(module, "_compiled_call_impl") is not None or "_orig_mod" in dict(module.named_children())


def attributes_beside_parameters(module: nn.Module) -> dict[str, Any]:
    """Returns all that a module holds, by name, but for the mapping of its own parameters."""
    TORCH.get(module, "_parameters")
    return {name: value for name, value in module.__dict__.items() if name != "_parameters"}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the mapping of a module's own parameters itself.

    To put something in a place without a check: inside ``torch.func.functional_call`` plain tensors are there.
    """
    parameters: dict[str, nn.Parameter | None] = TORCH.get(module, "_parameters")
    return parameters


def buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Returns the module's own buffers by name, also those that are None.

    The public ``named_buffers`` leaves out what is None and what another name holds too.
    """
    buffers: Mapping[str, Tensor | None] = TORCH.get(module, "_buffers")
    return buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Returns the names of the module's own buffers that its ``state_dict`` leaves out.

    A ``state_dict`` does not tell: hooks and subclasses change what is in it.
    """
    names: set[str] = TORCH.get(module, "_non_persistent_buffers_set")
    return names


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Returns the mapping of a module's own children itself, which later tells what is in their places then."""
    children: Mapping[str, nn.Module | None] = TORCH.get(module, "_modules")
    return children


def keep_children(network: nn.Module) -> Callable[[], None]:
    """Returns a function that gives the network's modules the children back that they have now, in this order.

    Setting a child in public moves it to the end where its name is gone, and refuses what is no module.
    """
    kept = [(module, dict(TORCH.get(module, "_modules"))) for module in network.modules()]

    def restore() -> None:
        for module, children in kept:
            module._modules.clear()
            module._modules.update(children)

    return restore


def with_children(
    module: nn.Module, children: Mapping[str, nn.Module], attributes: Sequence[str], **changed: object
) -> nn.Module:
    """Returns a module that shares all that ``module`` has, but for what is given.

    ``copy.copy`` would share the mapping of children as well.

    Args:
        module: The module.
        children: Its other children, by name.
        attributes: Names of ``vars(module)``: torch 2.11 cannot list them where it traces this, nor trace ``update``.
        changed: Other values for attributes, set where it has such.
    """
    other: nn.Module = object.__new__(type(module))
    for name in attributes:
        vars(other)[name] = changed[name] if name in changed else vars(module)[name]
    vars(other)["_modules"] = {**TORCH.get(module, "_modules"), **children}
    return other


def attributes_but_children(module: nn.Module) -> dict[str, Any]:
    """Returns what a module holds, its parameters, buffers and hooks included, without its children."""
    return {name: value for name, value in vars(module).items() if name != "_modules"}


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the module's own parameters and buffers by ``change`` of them; ``nn.Parameter`` objects stay.

    The public ``to_empty`` and ``to`` change all tensors, and here only some shall.
    """
    TORCH.get(module, "_apply")(change, recurse=False)
