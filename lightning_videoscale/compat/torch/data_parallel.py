"""Where DDP and FSDP2 wait, and what FSDP2 is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_videoscale.compat.patching import Method
from lightning_videoscale.compat.torch import TORCH
from lightning_videoscale.compat.torch.modules import parameters_of

_AFTER_FORWARD = "_sharded_post_forward_param"  # in the place of a parameter that is gathered over fewer ranks


def buffer_broadcasts(model: DistributedDataParallel) -> list[Method]:
    """The methods in which DDP's forward waits for rank 0's buffers; there is no hook around them."""
    return [_method(model, "_sync_buffers")]


def leave_to_caller(model: nn.Module, names: Iterable[str]) -> None:
    """Has DDP leave parameters alone that it cannot send, beside those that it was told to leave before.

    ``DistributedDataParallel`` has no argument for it.
    """
    told: Iterable[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    mark = TORCH.get(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model")
    mark(model, [*told, *names])


def has_new_buckets(model: DistributedDataParallel) -> bool:
    """Whether DDP has made its buckets anew, in the order of the first backward; it says so in its log alone."""
    return bool(TORCH.get(model, "_has_rebuilt_buckets"))


def gathers_and_reductions(root: nn.Module) -> list[Method]:
    """The methods in which FSDP2 waits for parameters and gradients of the modules that it sharded under ``root``.

    There is no hook around them: FSDP2's own hooks on a module run in an unspecified order with a user's.
    """
    # Modules that were sharded together share a state.
    states = [_state_of(module) for module in root.modules() if isinstance(module, FSDPModule)]
    names = ("pre_forward", "pre_backward", "post_backward")
    return [_method(group, name) for state in dict.fromkeys(states) for group in _groups(state) for name in names]


def note_dtypes(root: nn.Module) -> None:
    """Has FSDP2 note in which dtypes it gathers and reduces what it sharded under ``root``.

    Else it does so in the first forward, and of what is frozen just then it would have no dtype for gradients, ever.
    """
    for state in _outermost_states(root):
        TORCH.get(state, "_lazy_init")()


def end_passes(root: nn.Module) -> None:
    """Has FSDP2 do under ``root`` what it does at the end of a backward; collective if one was under way.

    After an exception no end comes: parameters stay gathered, and the next pass is taken for the rest of that one.
    """
    for state in _outermost_states(root):
        TORCH.put(TORCH.get(state, "_state_ctx"), "iter_forward_root", None)  # torch 2.11 leaves it
        TORCH.get(state, "_root_post_backward_final_callback")()


def modules_in_forward(network: nn.Module) -> list[FSDPModule]:
    """Returns what FSDP2 sharded and whose forward is under way, also around ``network``, which it must have sharded.

    FSDP2 tells nobody else in whose forward a call is.
    """
    sharded = next((module for module in network.modules() if isinstance(module, FSDPModule)), None)
    if sharded is None:
        return []
    states = TORCH.get(TORCH.get(_state_of(sharded), "_state_ctx"), "all_states")
    states = [state for state in states if TORCH.get(state, "_training_state").name == "FORWARD"]
    return [module for state in states for module in TORCH.get(state, "_modules") if isinstance(module, FSDPModule)]


def replacements(root: nn.Module) -> Callable[[], list[str]]:
    """Returns a function that tells in the place of which parameters somebody has put tensors that FSDP2 does not know.

    Of these FSDP2 says nothing, and goes on gathering its own.

    Args:
        root: Whose parameters it has sharded already, all that it is to shard.
    """
    paths = {module: f"{path}." if path else "" for path, module in root.named_modules()}
    states = dict.fromkeys(_state_of(module) for module in paths if isinstance(module, FSDPModule))
    all_held = [held for state in states for group in _groups(state) for held in TORCH.get(group, "fsdp_params")]
    places = [(TORCH.get(held, "_module_info"), held) for held in all_held]

    def replaced() -> list[str]:
        return [paths[info.module] + info.param_name for info, held in places if not _is_in_place(info, held)]

    return replaced


def _is_in_place(info: Any, held: Any) -> bool:
    """Whether a module has one of the tensors that FSDP2 keeps of a parameter: a shard, or what it gathered."""
    now = parameters_of(info.module).get(info.param_name)
    return any(now is getattr(held, name, None) for name in ("sharded_param", "_unsharded_param", _AFTER_FORWARD))


def _outermost_states(root: nn.Module) -> Iterator[Any]:
    """Of what FSDP2 sharded under ``root`` and lies in nothing else that it sharded."""
    outermost: list[nn.Module] = []
    for module in root.modules():
        if isinstance(module, FSDPModule) and not any(module in each.modules() for each in outermost):
            outermost.append(module)
            yield _state_of(module)


def _state_of(module: FSDPModule) -> Any:
    return TORCH.get(module, "_get_fsdp_state")()


def _groups(state: Any) -> Iterator[Any]:
    """FSDP2's groups of parameters: what is gathered and reduced at a time."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 may have several
    if groups is None:
        group = TORCH.get(state, "_fsdp_param_group")
        groups = [] if group is None else [group]
    yield from groups


def _method(owner: Any, name: str) -> Method:
    TORCH.get(owner, name)
    return Method(owner, name)
