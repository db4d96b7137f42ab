"""The dispatcher and the autograd engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from lightning_videoscale.compat.torch import TORCH

past_autograd = TORCH.function("torch._C", "_AutoDispatchBelowAutograd")
"""A context inside of which ops are dispatched past autograd, as an op's own autograd kernel calls the one below it.

``torch.library.register_autograd`` does this too, at several times the host's time per call.
"""


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open.

    The public way asks every tensor for its tangent, which costs microseconds per call.
    """
    try:
        return forward_ad._current_level >= 0
    except AttributeError as error:
        raise TORCH.missing("torch.autograd.forward_ad", "_current_level") from error


function_transforms_active: Callable[[], bool] = TORCH.function("torch._C", "_are_functorch_transforms_active")
"""Whether a transform of ``torch.func`` is under way; no public function says so."""


dispatch_modes_active: Callable[[], int] = TORCH.function("torch._C", "_len_torch_dispatch_stack")
"""How many modes watch what is dispatched, as fake tensors and selective checkpoints do; no public function says so."""


_function_mode_count: Callable[[], int] = TORCH.function("torch._C", "_len_torch_function_stack")
_function_mode_at: Callable[[int], TorchFunctionMode] = TORCH.function("torch._C", "_get_function_stack_at")


def function_modes() -> list[TorchFunctionMode]:
    """Returns the modes that follow calls of torch's functions, but for those that say where tensors are made.

    Inside the function of a mode, these are the ones around it. Compilers can trace this.
    """
    modes = [_function_mode_at(place) for place in range(_function_mode_count())]
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


is_tracing: Callable[[], bool] = TORCH.function("torch.jit", "is_tracing")
"""Whether ``torch.jit.trace`` is at work: a public function that has no types."""


def is_view(x: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one; no public function says so."""
    return TORCH.get(x, "_base") is not None


def adds_to_gradient(leaf: Tensor) -> bool:
    """Whether the backward pass under way adds to the leaf's ``.grad``, as ``loss.backward()`` does.

    It does not where `torch.autograd.grad` returns gradients, of this leaf or of others, nor where
    ``backward(inputs=...)`` names others. Only for the inside of a backward pass.
    """
    will_execute = TORCH.get("torch._C", "_will_engine_execute_node")
    try:
        return bool(will_execute(get_gradient_edge(leaf).node))
    except RuntimeError:  # so the engine says of a leaf whose gradient is returned
        return False


def saved_tensors_pack_hook() -> Callable[[Tensor], Any] | None:
    """Returns the innermost hook on tensors saved for backward, None without one; only setting one is public."""
    hooks: Any = TORCH.get("torch._C._autograd", "_top_saved_tensors_default_hooks")(True)
    return None if hooks is None else hooks[0]


def in_backward() -> bool:
    """Whether the autograd engine has called this, as where a checkpoint computes something again."""
    return bool(TORCH.get("torch._C", "_current_graph_task_id")() != -1)


def when_backward_ends(call: Callable[[], None]) -> None:
    """Has ``call`` run after the last gradient of the backward pass under way, before what is queued later.

    DDP and FSDP2 end their reductions in the same queue, which is the only one.
    """
    TORCH.get(TORCH.get(Variable, "_execution_engine"), "queue_callback")(call)


unsafe_view: Callable[[Tensor, torch.Size], Tensor] = torch.ops.aten._unsafe_view.default
"""Returns a tensor in another shape that autograd takes for no view, so that it may be written into.

Only for tensors that nobody else holds. The public ``view`` marks a view, and ``reshape`` one too.
"""


def has_hooks(x: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient, as `Tensor.register_hook` adds them."""
    return bool(TORCH.get(x, "_backward_hooks"))


def hooks_on_grad(leaf: Tensor) -> list[Callable[[Tensor], None]]:
    """Returns the hooks that see a leaf's ``.grad``, as `Tensor.register_post_accumulate_grad_hook` adds them."""
    hooks = TORCH.get(leaf, "_post_accumulate_grad_hooks") or {}
    return list(hooks.values())


def has_hooks_on_grad(leaf: Tensor) -> bool:
    """Whether a leaf has such hooks."""
    return bool(hooks_on_grad(leaf))


def version_of(x: Tensor) -> int:
    """Returns how often a tensor was written to; 0 in inference mode, which does not count."""
    if x.is_inference():
        return 0
    version: int = TORCH.get(x, "_version")
    return version
