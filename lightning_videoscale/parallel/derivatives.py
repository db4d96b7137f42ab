"""Which derivatives go through a split sequence: backward, and where each part has one, backward of backward.

`refuse_transforms`            no `torch.func` transform and no forward mode
`refuse_sharded_parameters`    no second backward where parameters are gone after the first
`without_second_derivative`    gradients whose own gradient is an error
`differentiable_once`          a backward that refuses to record what it computes
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.compat.deepspeed import is_partitioned
from lightning_videoscale.compat.torch.autograd import function_transforms_active, in_forward_mode


def refuse_transforms(what: str, tensors: Iterable[object]) -> None:
    """Refuses to compute ``what``, of which exchanges between ranks have no derivative.

    Raises:
        NotImplementedError: Inside a transform of `torch.func`, and for tensors with a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if function_transforms_active() or (in_forward_mode() and any(map(_has_tangent, tensors))):
        raise NotImplementedError(
            f"{what} is split over ranks, and has neither torch.func's transforms (grad, vjp, jvp, vmap) nor "
            "forward-mode derivatives. Use loss.backward() or torch.autograd.grad, with create_graph=True for a "
            "penalty on gradients of inputs, or compute this with one rank per sequence-parallel group."
        )


def refuse_sharded_parameters(network: nn.Module | None) -> None:
    """Refuses a second backward through parameters that an engine frees after each backward.

    Raises:
        NotImplementedError: If FSDP2 or stage 3 of ZeRO shards the network's parameters.
    """
    modules = () if network is None else network.modules()
    for module in modules:
        if isinstance(module, FSDPModule) or any(map(is_partitioned, module.parameters(recurse=False))):
            raise NotImplementedError(
                f"A second backward through {type(network).__name__}, as a penalty on gradients of inputs needs it, "
                "cannot work where parameters are sharded (FSDP2, ZeRO stage 3): they are freed after the first "
                'backward. Use strategy="ulysses_ddp", or stage 1 or 2 of ZeRO.'
            )


def without_second_derivative(gradients: tuple[Tensor, ...], inputs: tuple[Tensor, ...], what: str) -> Any:
    """Returns gradients whose own gradient with respect to the inputs is an error."""
    if not torch.is_grad_enabled():
        return gradients
    return _Refusal.apply(what, len(gradients), *gradients, *inputs)  # type: ignore[no-untyped-call]


def differentiable_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a backward an error where its gradients are to be differentiated again (``create_graph=True``)."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise NotImplementedError(what)
            return backward(ctx, *gradients)

        return run

    return decorate


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what, ctx.returns = what, "slice"
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(ctx.what)
