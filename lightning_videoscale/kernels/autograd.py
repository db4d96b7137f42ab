"""How the operations take part in autograd: backward once, in the dtypes of forward; nothing else, and not silently."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_videoscale.compat.torch.autograd import function_transforms_active, in_forward_mode, past_autograd

NAMESPACE = "lightning_videoscale"


def define_op(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Makes an op that computes by ``run``, and shapes alone by ``fake``; returns its name."""
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)
    return name


def register_autograd(
    name: str,
    differentiate: Callable[..., Any],
    save_for_backward: Callable[..., None],
    *,
    returns_list: bool = False,
) -> Callable[..., Any]:
    """Makes an op differentiable, as `torch.library.register_autograd` does at 40 µs less per call.

    That one reads the schema for default values every time; the schema of ``name`` must have none.

    Args:
        name: Of an op that is defined already, such as "lightning_videoscale::norm_modulate".
        differentiate: Called with the context and the gradient of every output; returns one per input.
        save_for_backward: Called with the context, the inputs and the output.
        returns_list: Whether the op returns ``Tensor[]``.
    """
    namespace, short = name.split("::")
    op: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short).default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below_autograd(*inputs)
            save_for_backward(ctx, inputs, output)
            return tuple(output) if returns_list else output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return differentiate(ctx, *gradients)

    def below_autograd(*inputs: Any) -> Any:
        with past_autograd():
            return op(*inputs)

    def autograd(*inputs: Any) -> Any:
        refuse_transforms(short, *inputs)
        if not _needs_gradient(*inputs):
            return below_autograd(*inputs)
        output = Differentiable.apply(*inputs)  # type: ignore[no-untyped-call]
        return list(output) if returns_list else output

    torch.library.impl(name, "Autograd", autograd)
    return op


def refuse_derivative(name: str, why: str, *, returns_list: bool = False) -> Callable[..., Any]:
    """Makes the gradient of an op, as that of a backward, a `NotImplementedError` that says why; returns the op."""

    def refuse(ctx: object, *gradients: Tensor) -> None:
        raise NotImplementedError(why)

    return register_autograd(name, refuse, lambda ctx, inputs, output: None, returns_list=returns_list)


def refuse_second_derivative(name: str, operation: str, *, returns_list: bool = True) -> Callable[..., Any]:
    """As `refuse_derivative`, of an op that computes the gradients of an operation of this room."""
    if returns_list:  # for others vmap calls the op once for each
        torch.library.impl(name, ("Batched", "FuncTorchBatched"), functools.partial(_refuse_batches, operation))
    return refuse_derivative(
        name,
        f"{operation} has no second derivative. If you need one (a gradient penalty, for example), leave this "
        "model without fused kernels.",
        returns_list=returns_list,
    )


def _refuse_batches(operation: str, *call: object) -> None:
    raise NotImplementedError(
        f"{operation} has no gradients of several losses at once (is_grads_batched=True, vectorize=True, torch.vmap). "
        "Take them one by one, or leave this model without fused kernels."
    )


def refuse_transforms(operation: str, *inputs: object) -> None:
    """Refuses what is no backward pass.

    Raises:
        NotImplementedError: If a tensor has a tangent, which would be lost without a word; or if one needs a gradient
            inside a transform of `torch.func`, which asks more of an autograd function than those of this room have.
    """
    if in_forward_mode() and any(map(_has_tangent, inputs)):
        raise NotImplementedError(
            f"{operation} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad). If you need one, "
            "leave this model without fused kernels."
        )
    if function_transforms_active() and _needs_gradient(*inputs):
        raise NotImplementedError(
            f"{operation} has no gradient inside torch.func's transforms (grad, vjp, jacrev, hessian, vmap). Take "
            "torch.autograd.grad, or leave this model without fused kernels."
        )


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _needs_gradient(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def each_once(*inputs: Any) -> tuple[Any, ...]:
    """Returns the inputs of an autograd function; of a tensor that comes again, as tied weights do, a view.

    Torch's compiler breaks the graph at a function that is given one tensor twice. Eager code needs no view.
    """
    if not torch.compiler.is_compiling():
        return inputs
    found: list[Any] = []
    for x in inputs:
        found.append(x.view_as(x) if isinstance(x, Tensor) and any(x is other for other in found) else x)
    return tuple(found)


def under_autocast(x: Tensor) -> bool:
    """Whether PyTorch's operations on tensors like x choose their dtype themselves just now: not on float64."""
    kind = x.device.type
    return kind != "meta" and x.dtype is not torch.float64 and torch.is_autocast_enabled(kind)  # meta has none to ask


def in_dtypes_of_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backward of PyTorch's operations one that an autocast context around it does not change."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        if not under_autocast(gradients[0]):
            return backward(ctx, *gradients)
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return run
