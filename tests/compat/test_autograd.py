"""What becomes of gradients, and what follows each function: as the installed torch tells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_videoscale.compat.torch.autograd import (
    adds_to_gradient,
    dispatch_modes_active,
    function_modes,
    has_hooks,
    is_view,
    version_of,
)


class Asking(torch.autograd.Function):
    """The sum of two; in backward, it asks what becomes of the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, answers: list[bool], first: Tensor, second: Tensor) -> Tensor:
        ctx.answers, ctx.leaf = answers, first
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.answers.append(adds_to_gradient(ctx.leaf))
        return None, gradients[0], gradients[0]


def test_gradients_are_added_up_or_returned() -> None:
    answers: list[bool] = []
    a, b = (torch.ones((), requires_grad=True) for _ in range(2))

    def total() -> Tensor:
        result: Tensor = Asking.apply(answers, a, b)
        return result

    total().backward()
    total().backward(inputs=[a])
    total().backward(inputs=[b])
    torch.autograd.grad(total(), [a])
    torch.autograd.grad(total(), [b])
    assert answers == [True, True, False, False, False]


def test_views_are_told_from_copies() -> None:
    whole = torch.ones(4, requires_grad=True) * 2
    assert is_view(whole[1:]) and is_view(whole.view(2, 2)) and not is_view(whole) and not is_view(whole[1:].clone())


def test_modes_that_follow_functions_are_noticed() -> None:
    assert not function_modes()
    with torch.device("cpu"):
        assert not function_modes()
    with BaseTorchFunctionMode():
        assert function_modes()
    assert not function_modes()


def test_hooks_on_a_gradient_are_noticed() -> None:
    x = torch.ones((), requires_grad=True)
    assert not has_hooks(x)
    hook = x.register_hook(lambda gradient: gradient)
    assert has_hooks(x)
    hook.remove()
    assert not has_hooks(x)


def test_writing_to_a_tensor_is_counted() -> None:
    x = torch.ones(2)
    before = version_of(x)
    x[0].add_(1)
    assert version_of(x) == before + 1
    with torch.inference_mode():
        y = torch.ones(2)
        assert version_of(y.add_(1)) == 0


def test_modes_that_watch_what_is_dispatched_are_counted() -> None:
    assert dispatch_modes_active() == 0
    with FakeTensorMode():
        assert dispatch_modes_active() == 1
        with FlopCounterMode(display=False):
            assert dispatch_modes_active() == 2
    with BaseTorchFunctionMode():
        assert dispatch_modes_active() == 0
