"""Where a module calls torch's attention, with and without the installed torch's compiler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.compat import patching


class Context(nullcontext[None]):
    """Doubles what it is asked to attend."""

    entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def attend_tokens_first(self, q: Tensor) -> Tensor:
        return 2 * q


class Attending(nn.Module):
    forward_says_where_it_attends = True

    def forward(self, x: Tensor) -> Tensor:
        with patching.around_attention(self):
            return (patching.instead_of_attention(self) or torch.neg)(x)


def test_a_context_is_entered_where_a_module_attends() -> None:
    module, context, x = Attending(), Context(), torch.ones(1)
    assert patching.call_within(module, context, lambda: module(x)) == 2
    assert context.entered == 1
    assert module(x) == -1
    with pytest.raises(ZeroDivisionError):
        patching.call_within(module, context, lambda: 1 / 0)
    assert module(x) == -1


def test_compiled_code_attends_as_without_a_context() -> None:
    module, context, x = Attending(), Context(), torch.ones(1)
    compiled = torch.compile(module.forward, backend="eager", fullgraph=True)
    assert patching.call_within(module, context, lambda: compiled(x)) == -1
    assert context.entered == 0


def test_a_forward_of_its_own_is_noticed_unless_it_only_redirects() -> None:
    module: Any = Attending()
    assert patching.says_where_it_attends(module)
    assert not patching.says_where_it_attends(nn.Identity())
    assert not patching.replaces_forward(module)
    undo = patching.patch(module, "forward", patching.only_redirects(lambda x: x))
    assert not patching.replaces_forward(module)
    assert not patching.says_where_it_attends(module)
    undo()
    patching.patch(module, "forward", lambda x: x)
    assert patching.replaces_forward(module)


def test_a_compiled_module_replaces_no_forward() -> None:
    module = Attending()
    module.compile(backend="eager")
    assert not patching.replaces_forward(module)
    assert module(torch.ones(1)) == -1
