"""A second backward through a sharded module: `refuse_second_backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_leaves, tree_map_only
from lightning_videoscale.parallel.derivatives import refuse_sharded_parameters


def refuse_second_backward(module: nn.Module) -> None:
    """Has a sharded module refuse that gradients of its inputs are differentiated, as a penalty on them needs it.

    FSDP2 frees the module's parameters when the first backward has reached its inputs. Of what comes then, torch only
    says that data is not allocated.
    """
    module.register_forward_pre_hook(_watch_inputs, with_kwargs=True)


def _watch_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    differentiated = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    if not differentiated or not torch.is_grad_enabled():
        return None

    def refuse(_: Tensor) -> None:
        refuse_sharded_parameters(module)

    def watch_gradient(gradient: Tensor) -> Tensor:
        return _watched(gradient, refuse)

    return tree_map_only(Tensor, lambda x: _watched(x, watch_gradient), (args, kwargs))


def _watched(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """A view of a tensor, since others may use the tensor too, with a hook on its gradient."""
    if not x.requires_grad:
        return x
    own = x.view_as(x)
    own.register_hook(hook)
    return own
