"""What we use of torch's compiler in private does what we say, in the installed version."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.compat.torch import compilation


def test_code_that_stays_compiled_says_where_it_would_not() -> None:
    module = nn.Linear(2, 2)
    compiled = torch.compile(module.forward, backend="eager", dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    stays, goes_on = (compilation.with_integers_that_vary(compiled, stays_compiled=stays) for stays in (True, False))
    for size in range(2, 2 + limit):
        stays(torch.ones(size, 2))
    with pytest.raises(RuntimeError, match=rf"{limit} times.*recompile_limit"):
        stays(torch.ones(2 + limit, 2))
    assert goes_on(torch.ones(2 + limit, 2)).shape == (2 + limit, 2)


def test_compiled_code_keeps_the_order_and_number_of_ops() -> None:
    calls: list[float] = []

    def run(x: Tensor, number: float) -> Tensor:
        calls.append(number)
        return x + number

    name = "lightning_videoscale_tests::noted"
    torch.library.define(name, "(Tensor x, float number) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, lambda x, number: torch.empty_like(x))
    compilation.keep_order(name)
    op = torch.ops.lightning_videoscale_tests.noted

    def program(x: Tensor) -> Tensor:
        last = op(x, 1.0)
        op(x, 2.0)  # nobody reads it
        return op(x, 3.0) - last

    out = torch.compile(program, backend="aot_eager", fullgraph=True)(torch.zeros(2))
    assert calls == [1.0, 2.0, 3.0] and out.tolist() == [2.0, 2.0]
